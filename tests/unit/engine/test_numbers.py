"""The box for a program's own numbers: attribute access, its state, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.engine.numbers import Numbers
from shoal.engine.training_state import Stateful, flatten, unflatten
from shoal.errors import UsageError


def test_its_state_can_be_sent_and_put_back() -> None:
    numbers = Numbers(best=math.inf, seen=0, name="first", counts=torch.zeros(3))
    assert isinstance(numbers, Stateful)
    numbers.best = np.float64(0.5)
    numbers.add(seen=3)
    numbers.counts[1] = 2
    tree = flatten("numbers", numbers.state_dict())
    other = Numbers(best=math.inf, seen=0, name="", counts=torch.zeros(3))
    other.load_state_dict(unflatten(tree.values, tree.tensors))
    assert (other.best, other.seen, other.name, other.counts.tolist()) == (0.5, 3, "first", [0, 2, 0])
    assert repr(Numbers(best=1.5, seen=2)) == "shoal.Numbers(best=1.5, seen=2)"


def test_wrong_use_is_refused() -> None:
    numbers = Numbers(best=1.0)
    with pytest.raises(UsageError, match="has no number named bset"):
        numbers.bset = 2.0
    with pytest.raises(UsageError, match="cannot have best: it is a list"):
        numbers.best = [1.0]  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot have a number named state_dict"):
        Numbers(state_dict=1)
    with pytest.raises(AttributeError, match="has no 'bset': it has best"):
        print(numbers.bset)
    with pytest.raises(UsageError, match="the saved numbers are other, and the program has best"):
        numbers.load_state_dict({"other": 1})

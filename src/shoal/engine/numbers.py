"""`shoal.Numbers`: a program's own numbers as a part of the training's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.errors import UsageError

Value = bool | int | float | str | Tensor | None


class Numbers:
    """Numbers, texts and tensors by name, to be attached: copied to joining ranks, saved, and put back with the state.

        numbers = shoal.Numbers(seen=0, name="first")
        session.attach(model, optimizer, numbers)
        step.update(after=lambda: numbers.add(seen=64))

    Names are given at the start: a misspelt one is refused.
    """

    _values: dict[str, Value]

    def __init__(self, **values: Value) -> None:
        object.__setattr__(self, "_values", {})
        for name, value in values.items():
            if hasattr(type(self), name):
                raise UsageError(
                    f"shoal.Numbers cannot have a number named {name}",
                    why="it has a method of that name",
                    fix=f"choose another name: shoal.Numbers(my_{name}=…)",
                )
            self._values[name] = _checked(name, value)

    def add(self, **amounts: float) -> None:
        """Add to numbers; an assignment cannot stand in a lambda."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"shoal.Numbers has no {name!r}: it has {', '.join(values) or 'no names'}")

    def __setattr__(self, name: str, value: Value) -> None:
        if name not in self._values:
            raise UsageError(
                f"shoal.Numbers has no number named {name}",
                why="the names are given when it is made, so that all ranks have the same ones and none is misspelt: "
                + (", ".join(self._values) or "none"),
                fix=f"give it at the start: shoal.Numbers({name}=…)",
            )
        self._values[name] = _checked(name, value)

    def __repr__(self) -> str:
        return f"shoal.Numbers({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Value]:
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        if state.keys() != self._values.keys():
            raise UsageError(
                f"the saved numbers are {', '.join(state)}, and the program has {', '.join(self._values)}",
                why="the state was saved by another version of the program",
                fix="give shoal.Numbers the same names, or start a new run",
            )
        self._values.update({name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()})


def _checked(name: str, value: Any) -> Value:
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, bool | int | float | str | Tensor | None):
        raise UsageError(
            f"shoal.Numbers cannot have {name}: it is a {type(value).__qualname__}",
            why="it has numbers, texts and tensors, which can be sent to other ranks and saved without pickle",
            fix="keep each number under a name of its own, or many of them in a tensor",
        )
    return value.detach() if isinstance(value, Tensor) else value

"""Outer steps: replicas train alone for a round of steps, and then agree on what they learned. See docs/sync.md.

    EveryStep   nothing to do: gradients are exchanged in every step, so replicas never part
    Rounds      all parameters at the end of a round: LocalSGD (the average), DiLoCo (Nesterov momentum)
    Streaming   fragment by fragment, while training goes on (`sync/streaming.py`)

After each step of the inner optimizer the trainer calls `after`. What is common to all replicas (parameters and outer
momentum) has the same bits on every rank; the inner moments stay each rank's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from shoal.sync.flight import Exchange
from shoal.sync.piece import AVERAGE, Descent, Piece
from shoal.sync.times import CommTimes

# So many steps may a rank be ahead of the slowest: their pace varies from step to step, and nobody waits for that.
LAG_STEPS = 8

_NOTHING = CommTimes(ready_at=0.0, tail_s=0.0, allreduce_s=None, wait_s=0.0)


class Outer(Protocol):
    """`round_steps`: steps from one exchange of all parameters to the next. `lag_steps`: how far ranks may drift
    apart. `drifts`: replicas go their own ways between exchanges, so that a checkpoint needs a part of every rank;
    `apart`: they have other parameters just now; `in_rounds`: a step is done when its round is."""

    round_steps: int
    lag_steps: int
    drifts: bool
    apart: bool
    in_rounds: bool

    def after(self, step: int, last: bool) -> CommTimes:
        """What is due after this step. After the `last` one replicas are equal to the bit."""

    def common(self) -> AbstractContextManager[None]:
        """Inside, the model holds what is common to all replicas."""

    def common_step(self, step: int) -> int:
        """How far the common state has come when the replicas have come to `step`."""

    @property
    def flying(self) -> int:
        """What is on its way between replicas, a bit a fragment."""

    def rewind(self, common_step: int, flying: int) -> None:
        """What the model holds is common and has come so far; `state` then has room for what is to be loaded."""

    def retreat(self, step: int) -> int:
        """From an exchange that failed: the model holds what others could go on from, and that is of the step that is
        returned."""

    def lasting(self) -> dict[str, Tensor]:
        """What of `state` outlives a world: nothing that was on its way."""

    def state(self) -> dict[str, Tensor]:
        """What is common beside the parameters. The tensors are those in use: filling them loads a state."""

    def own_state(self) -> dict[str, Tensor]: ...
    def load_own_state(self, state: Mapping[str, Tensor]) -> None: ...


class EveryStep:
    round_steps = 1
    lag_steps = 0
    drifts = False
    apart = False
    in_rounds = False
    flying = 0

    def after(self, step: int, last: bool) -> CommTimes:
        return _NOTHING

    def common(self) -> AbstractContextManager[None]:
        return nullcontext()

    def common_step(self, step: int) -> int:
        return step

    def rewind(self, common_step: int, flying: int) -> None:
        pass

    def retreat(self, step: int) -> int:
        return step

    def lasting(self) -> dict[str, Tensor]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def own_state(self) -> dict[str, Tensor]:
        return {}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class Parted(ABC):
    """What all ways have in common in which replicas part and meet again."""

    drifts = True
    in_rounds = False
    lag_steps = LAG_STEPS

    def __init__(self, pieces: Sequence[Piece], exchange: Exchange, every: int, descent: Descent) -> None:
        self.round_steps = every
        self._pieces = pieces
        self._exchange = exchange
        self._descent = descent
        self.apart = False

    @contextmanager
    def common(self) -> Iterator[None]:
        for piece in self._pieces:
            piece.swap()
        try:
            yield
        finally:
            for piece in self._pieces:
                piece.swap()

    def rewind(self, common_step: int, flying: int) -> None:
        for piece in self._pieces:
            piece.rewind()

    def retreat(self, step: int) -> int:
        """Half a round would be half a training: it is done again, from what all have in common."""
        for piece in self._pieces:
            piece.adopt()
        return self.common_step(step)

    @abstractmethod
    def common_step(self, step: int) -> int: ...

    def lasting(self) -> dict[str, Tensor]:
        return {name: tensor for piece in self._pieces for name, tensor in piece.state().items()}

    def state(self) -> dict[str, Tensor]:
        return self.lasting()

    def own_state(self) -> dict[str, Tensor]:
        return self._exchange.wire.state()

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self._exchange.wire.load_state(state)


class Rounds(Parted):
    """LocalSGD and DiLoCo: everything at once at the end of each round.

    A training that ends inside a round ends with the plain average: momentum belongs to whole rounds, and would carry
    replicas far past what they learned in a part of one.
    """

    flying = 0
    in_rounds = True

    def __init__(self, pieces: Sequence[Piece], exchange: Exchange, every: int, descent: Descent) -> None:
        super().__init__(pieces, exchange, every, descent)
        self._common_step = 0

    def after(self, step: int, last: bool) -> CommTimes:
        is_whole = step % self.round_steps == 0
        self.apart = not (is_whole or last)
        if not self.apart:
            self._exchange.everything(self._pieces, self._descent if is_whole else AVERAGE)
            self._common_step = step
        return self._exchange.times()

    def common_step(self, step: int) -> int:
        return self._common_step

    def rewind(self, common_step: int, flying: int) -> None:
        super().rewind(common_step, flying)
        self._common_step = common_step

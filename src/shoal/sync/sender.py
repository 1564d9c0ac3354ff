"""Puts the gaps of outer steps on the wire, in the format that was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.futures import Future

from shoal.sync.piece import Piece
from shoal.sync.wire import Wire
from shoal.sync.world import World


class Sender:
    """`state` is what the format carries over from one exchange to the next, each rank its own."""

    def __init__(self, world: World, wire: Wire) -> None:
        self._world = world
        self._wire = wire

    def __call__(self, piece: Piece, gap: Tensor, last: bool) -> Future[Tensor]:
        """A future of the same tensor holding the sum; `last`: nothing else is sent before somebody waits for it."""
        return self._wire(self._world, gap)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass

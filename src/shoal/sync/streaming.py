"""Streaming DiLoCo: the model is exchanged fragment by fragment, and nobody waits while one is on its way.

A fragment sent after step b is worked in after step b + overlap: the outer optimizer moves what is common, and each
replica, which has trained on meanwhile, goes half of the way there. Fragments take turns, evenly spread over a round,
so that the wire is used all the time instead of all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.sync.flight import Exchange, Flight
from shoal.sync.fragments import is_sent_at
from shoal.sync.outer import Parted
from shoal.sync.piece import AVERAGE, Descent, Piece
from shoal.sync.times import CommTimes

# What a replica keeps of its own when a fragment comes back; the rest is what all agreed on.
MIX = 0.5


class Streaming(Parted):
    def __init__(
        self, fragments: Sequence[Sequence[Piece]], exchange: Exchange, every: int, overlap: int, descent: Descent
    ) -> None:
        super().__init__([piece for fragment in fragments for piece in fragment], exchange, every, descent)
        self._fragments = fragments
        self._overlap = overlap
        self._flying: dict[int, list[Flight]] = {}
        self._is_ending = False

    def after(self, step: int, last: bool) -> CommTimes:
        for index in list(self._flying):
            if last or self._is_sent(index, step - self._overlap):
                self._work_in(index)
        if last:
            self._is_ending = True
            self._exchange.everything(self._pieces, AVERAGE)
            self._is_ending = False
        else:
            self._send(step)
        self.apart = not last
        return self._exchange.times()

    def common_step(self, step: int) -> int:
        """There is no step at which everything was exchanged; what is common goes along with the training."""
        return step

    @property
    def flying(self) -> int:
        return sum(1 << index for index in self._flying)

    def rewind(self, common_step: int, flying: int) -> None:
        super().rewind(common_step, flying)
        self._flying = {
            index: [Flight.over(piece, piece.gap(0.0)) for piece in fragment]
            for index, fragment in enumerate(self._fragments)
            if flying >> index & 1
        }

    def retreat(self, step: int) -> int:
        """There is no step to go back to. What this replica has learned stays, unless the sums of the last exchange
        have begun to take its place; what was on its way is lost."""
        self._flying = {}
        if self._is_ending:
            super().retreat(step)
        return step

    def state(self) -> dict[str, Tensor]:
        """With the sums that were on their way: whoever resumes works them in at the same step."""
        sums = {
            f"outer.sum.{index}.{number}": flight.land()
            for index, flights in self._flying.items()
            for number, flight in enumerate(flights)
        }
        return self.lasting() | sums

    def _send(self, step: int) -> None:
        for index, fragment in enumerate(self._fragments):
            if self._is_sent(index, step):
                self._flying[index] = list(self._exchange.begin(fragment))

    def _work_in(self, index: int) -> None:
        for flight in self._flying.pop(index):
            flight.piece.descend(self._exchange.land(flight), self._descent)
            flight.piece.adopt(MIX)

    def _is_sent(self, index: int, step: int) -> bool:
        return is_sent_at(step, index, len(self._fragments), self.round_steps)

"""Pieces of the model on their way over the wire, and how long that took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.futures import Future

from shoal.sync.piece import Descent, Piece
from shoal.sync.times import CommTimes, covered
from shoal.sync.wires import Bucket, Wire
from shoal.sync.world import World, barrier

# Pieces of one exchange under way at once: the wire is busy while the one before is worked in. A format of two rounds
# ends a piece when two more were handed over (`wires/lane.py`), so it may not be less.
_WINDOW = 2


class Flight:
    """The gap of one piece, becoming the sum over the world."""

    def __init__(self, piece: Piece, future: Future[Tensor]) -> None:
        self.piece = piece
        self.span = [time.perf_counter(), 0.0]
        self._future = future.then(self._note_end)

    @classmethod
    def over(cls, piece: Piece, gap: Tensor) -> Flight:
        """One that landed before the training was interrupted."""
        done: Future[Tensor] = Future()
        done.set_result(gap)
        return cls(piece, done)

    def land(self) -> Tensor:
        return self._future.wait()

    def _note_end(self, done: Future[Tensor]) -> Tensor:
        self.span[1] = time.perf_counter()
        return done.value()


class Exchange:
    """Sends pieces and books the time: how long this rank was blocked, and how much of that because a peer was late."""

    def __init__(self, world: World, wire: Wire, weight: float, timed: bool = True) -> None:
        self.wire = wire
        self._world = world
        self._weight = weight
        self._timed = timed
        self._blocked_s = 0.0
        self._wait_s = 0.0
        self._spans: list[list[float]] = []

    def begin(self, pieces: Sequence[Piece]) -> Iterator[Flight]:
        """One by one, as they are asked for: the gap of a piece is made when it is sent."""
        for piece in pieces:
            bucket = Bucket(piece.index, piece.gap(self._weight), piece.parameters, is_last=piece is pieces[-1])
            yield Flight(piece, self.wire(bucket))

    def land(self, flight: Flight) -> Tensor:
        began = time.perf_counter()
        gap = flight.land()
        self._blocked_s += time.perf_counter() - began
        self._spans.append(flight.span)
        return gap

    def everything(self, pieces: Sequence[Piece], descent: Descent) -> None:
        """All pieces now, everybody waiting: a few under way at a time, so that their gaps need little memory.

        Nothing that is common changes before all sums are here: a peer that leaves in the middle leaves no replica
        between two rounds. The sums wait in place of the replica's own parameters, which they replace anyway.
        """
        self._meet()
        flights: deque[Flight] = deque()
        for flight in self.begin(pieces):
            flights.append(flight)
            if len(flights) > _WINDOW:
                self._put_by(flights.popleft())
        while flights:
            self._put_by(flights.popleft())
        for piece in pieces:
            piece.descend_by_own(descent)
            piece.adopt()

    def times(self) -> CommTimes:
        """Since the last time somebody asked."""
        spans, self._spans = sorted(self._spans), []
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        wait_s, self._wait_s = self._wait_s, 0.0
        return CommTimes(
            ready_at=time.perf_counter() - blocked_s,
            tail_s=blocked_s,
            allreduce_s=covered(spans) if spans and self._timed else None,
            wait_s=wait_s,
        )

    def _meet(self) -> None:
        """One message a round, and it tells a late peer from a slow network."""
        began = time.perf_counter()
        barrier(self._world)
        waited_s = time.perf_counter() - began
        self._wait_s += waited_s
        self._blocked_s += waited_s

    def _put_by(self, flight: Flight) -> None:
        flight.piece.put_by(self.land(flight))

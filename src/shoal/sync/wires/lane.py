"""Exchanges of several rounds, started in the same order on every rank.

gloo pairs the collectives of two ranks by the order in which each rank started them. A second round that is started
from a callback of the first starts whenever that happens to end, before the next bucket on one rank and behind it on
another. A lane is one thread that takes buckets as backward hands them over, and gives out turns: in the turn of
bucket k, k starts its first round, k-1 its second and so on. So the order is fixed, and while one bucket is on the wire
another one is computed on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

from shoal.sync.wires.bucket import Bucket

# Each `yield` ends a turn: collectives were started, and what they bring is waited for in the next one.
Rounds = Generator[None, None, None]


@dataclass
class _Job:
    rounds: Rounds
    bucket: Bucket
    over: Future[None] = field(default_factory=Future)
    error: Exception | None = None

    def result(self, _: object) -> Tensor:
        """Raised inside a callback an error reaches DDP as an error; `set_exception` would hand it over as a value."""
        if self.error is not None:
            raise self.error
        return self.bucket.flat


class Lane:
    def __init__(self) -> None:
        self._waiting: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, rounds: Rounds, bucket: Bucket) -> Future[Tensor]:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._waiting,), name="wire", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._waiting.put, None)
        job = _Job(rounds, bucket)
        done: Future[Tensor] = job.over.then(job.result)
        self._waiting.put(job)
        return done


@torch.no_grad()
def _serve(waiting: SimpleQueue[_Job | None]) -> None:
    running: list[_Job] = []
    while (job := waiting.get()) is not None:
        running = _take_turns([*running, job])
        while running and job.bucket.is_last:
            running = _take_turns(running)


def _take_turns(running: list[_Job]) -> list[_Job]:
    """The newest first: what it starts is on its way while the older ones compute. Those that go on, oldest first."""
    try:
        going = [job for job in reversed(running) if _advance(job)]
    except Exception as error:  # what went wrong belongs to those who wait, not to this thread
        for job in running:
            job.error = job.error or error
            _finish(job)
        return []
    return going[::-1]


def _advance(job: _Job) -> bool:
    try:
        next(job.rounds)
    except StopIteration:
        _finish(job)
        return False
    return True


def _finish(job: _Job) -> None:
    if not job.over.done():
        job.over.set_result(None)

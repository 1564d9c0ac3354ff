"""Exchanges of chunks between all ranks, a few under way at once, in one fixed order.

gloo matches the collectives of two ranks by the order in which each rank started them, and sends large messages at half
the link's speed, but several of a megabyte at once at 92% of it. So one thread starts the exchanges of all jobs, in the
order in which jobs were handed over, which is the same on all ranks. It finishes the oldest exchange when a certain
number is under way, or at the end of a job that is said to be the last one for now: neither depends on time. What an
exchange leads to may start another one, whose place in the order is then fixed too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.compression.base import begun
from shoal.sync.interruptible import await_work
from shoal.sync.shared_memory.ddp import PipelineStage
from shoal.sync.world import World

# What a rank sends to each other rank in one exchange, and how many exchanges are under way at once.
CHUNK_BYTES = 1 << 20
UNDER_WAY = 6


@dataclass(frozen=True)
class Chunk:
    """One exchange: bytes to and from every rank."""

    sent: Sequence[int]  # Bytes to each rank.
    received: Sequence[int]  # Bytes from each rank.
    fill: Callable[[Sequence[Tensor]], None]  # Writes the bytes to each rank.
    # Takes the bytes from each rank; returns the exchange that follows from them, if any.
    take: Callable[[Sequence[Tensor]], Chunk | None]


@dataclass
class _ChunkJob:
    done: Future[float] = field(default_factory=Future)
    left: int = 0  # Exchanges that are not finished.
    conclude: Callable[[], None] = lambda: None  # Called by the pipeline's thread before the job is done.
    is_started: bool = False  # All its exchanges are.


@dataclass
class _Flying:
    job: _ChunkJob
    chunk: Chunk
    buffers: tuple[Tensor, Tensor]
    work: dist.Work


class ChunkPipeline:
    def __init__(self, world: World) -> None:
        self._world = world  # Its group is used by this pipeline alone.
        self._flying: deque[_Flying] = deque()
        self._unfinished: deque[_ChunkJob] = deque()
        self._free: list[tuple[Tensor, Tensor]] = []
        self._stage = PipelineStage("wire", lambda: None)

    def put(self, chunks: Iterable[Chunk], is_last: bool, conclude: Callable[[], None] = lambda: None) -> Future[float]:
        """Exchange chunks; return a future of the time when all of them were finished, by perf_counter.

        Without `is_last` more jobs follow, and the last exchanges of this one wait for them.
        """
        job = _ChunkJob(conclude=conclude)
        self._stage.submit(self._run, job, chunks, is_last).add_done_callback(partial(_pass_error, job.done))
        return job.done

    def close(self) -> None:
        self._stage.close()
        self._free.clear()

    @torch.no_grad()
    def _run(self, job: _ChunkJob, chunks: Iterable[Chunk], is_last: bool) -> None:
        self._unfinished.append(job)
        try:
            for chunk in chunks:
                self._start(job, chunk)
            job.is_started = True
            while is_last and self._flying:
                self._finish_oldest()
            self._complete_jobs()
        except Exception as error:
            self._flying.clear()
            for unfinished in self._unfinished:
                unfinished.done.set_exception(error)
            raise

    def _start(self, job: _ChunkJob, chunk: Chunk) -> None:
        while len(self._flying) >= UNDER_WAY:
            self._finish_oldest()
        # A byte for itself: gloo takes no message without any.
        sent, received = (self._with_own(counts) for counts in (chunk.sent, chunk.received))
        buffers = self._take_buffers(sum(sent), sum(received))
        outgoing, incoming = buffers[0][: sum(sent)], buffers[1][: sum(received)]
        chunk.fill(self._without_own(outgoing.split(sent)))
        work = begun(dist.all_to_all_single(incoming, outgoing, received, sent, group=self._world.group, async_op=True))
        job.left += 1
        self._flying.append(_Flying(job, chunk, buffers, work))

    def _finish_oldest(self) -> None:
        flying = self._flying.popleft()
        await_work(flying.work, self._world.release)
        received = self._with_own(flying.chunk.received)
        following = flying.chunk.take(self._without_own(flying.buffers[1][: sum(received)].split(received)))
        self._free.append(flying.buffers)
        flying.job.left -= 1
        if following is not None:
            self._start(flying.job, following)
        self._complete_jobs()

    def _complete_jobs(self) -> None:
        while self._unfinished and self._unfinished[0].is_started and not self._unfinished[0].left:
            self._unfinished[0].conclude()
            self._unfinished.popleft().done.set_result(time.perf_counter())

    def _with_own(self, counts: Sequence[int]) -> list[int]:
        return [_OWN_BYTES if rank == self._world.rank else count for rank, count in enumerate(counts)]

    def _without_own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part[:0] if rank == self._world.rank else part for rank, part in enumerate(parts)]

    def _take_buffers(self, sent: int, received: int) -> tuple[Tensor, Tensor]:
        """Return buffers of at least these sizes. Sizes differ little: every buffer grows to the largest soon."""
        outgoing, incoming = self._free.pop() if self._free else (torch.empty(0), torch.empty(0))
        return _at_least(outgoing, sent), _at_least(incoming, received)


# Keeps what follows aligned for numbers of all types.
_OWN_BYTES = 64


def _at_least(buffer: Tensor, count: int) -> Tensor:
    return buffer if buffer.dtype == torch.uint8 and len(buffer) >= count else torch.empty(count, dtype=torch.uint8)


def _pass_error(done: Future[float], ran: Future[None]) -> None:
    error = ran.exception()
    if error is not None and not done.done():
        done.set_exception(error)

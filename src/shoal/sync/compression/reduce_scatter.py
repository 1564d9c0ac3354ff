"""Sums in fp32 with fewer bytes: every rank sums its own part of each bucket, and sends the encoded result to all.

The first round is a reduce-scatter (by all-to-all: gloo's own costs more than an all-reduce), the second an all-gather,
both in chunks, so that one is encoded while another travels. Each rank sends 2(N-1)/N of the bucket, as in a ring. A
rank's own part is not rounded before the sum, and all ranks decode what its owner has rounded: all get the same bits,
whatever their processors are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.cost.model_size import BLOCK, blocks_of
from shoal.sync.compression.base import Bucket, BufferPool, State, begun, load_tensors
from shoal.sync.helper_threads import compute_alone
from shoal.sync.interruptible import await_work
from shoal.sync.world import World

# gloo moves large messages at half the link's speed, and several of this size at a time at 92% of it.
_CHUNK_BYTES = 2**20


class Codec(Protocol):
    """Encodes blocks of numbers as records of bytes: `records` has a row for each block; the last block may be shorter.

    `residual` is the rounding error of earlier steps, replaced by that of this step; empty for a codec that keeps none.
    """

    record_bytes: int
    keeps_residual: bool

    def encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None: ...

    def reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        """Add the records of other ranks to the gradient, and encode the sum. The gradient may be overwritten."""

    def decode(self, records: Tensor, gradient: Tensor) -> None: ...


@dataclass(frozen=True)
class _BucketBuffers:
    """The layout and the buffers of a bucket, by chunk and rank."""

    layout: ScatterLayout
    parts: Tensor  # what goes to each owner, and afterwards what each owner sends back
    received: Tensor
    own: Tensor


class ReduceScatter:
    def __init__(self, world: World, parameters: Mapping[str, Tensor], codec: Codec) -> None:
        self._world = world
        self._codec = codec
        self._queue = OrderedQueue()
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        self._residuals = [torch.zeros(p.numel() * codec.keeps_residual) for p in parameters.values()]
        self._buffers = BufferPool(self._make_buffers)

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._queue.put(self._rounds(bucket, self._buffers.of(bucket)), bucket)

    def state(self) -> dict[str, Tensor]:
        if not self._codec.keeps_residual:
            return {}
        named = zip(self._shapes.items(), self._residuals, strict=True)
        return {f"residual.{name}": residual.view(shape) for (name, shape), residual in named}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def _make_buffers(self, bucket: Bucket) -> _BucketBuffers:
        members = [(self._numbers[id(parameter)], parameter.numel()) for parameter in bucket.parameters]
        layout = lay_out(members, self._world.size, self._codec.record_bytes)
        shape = (layout.records, self._codec.record_bytes)
        parts, received = (
            torch.zeros((len(layout.chunks), self._world.size, *shape), dtype=torch.int8) for _ in range(2)
        )
        return _BucketBuffers(layout, parts, received, torch.zeros(len(layout.chunks), *shape, dtype=torch.int8))

    def _rounds(self, bucket: Bucket, buffers: _BucketBuffers) -> Rounds:
        chunks = range(len(buffers.layout.chunks))
        scattered = [self._scatter(bucket, buffers, chunk) for chunk in chunks]
        yield
        gathered = [self._reduce_and_gather(bucket, buffers, chunk, scattered[chunk]) for chunk in chunks]
        yield
        for chunk in chunks:
            await_work(gathered[chunk], self._world.release)
            for owner, ranges in enumerate(buffers.layout.chunks[chunk]):
                for run in ranges:
                    self._codec.decode(buffers.parts[chunk, owner, run.of_records], bucket.flat[run.of_bucket])

    def _scatter(self, bucket: Bucket, buffers: _BucketBuffers, chunk: int) -> dist.Work:
        for owner, ranges in enumerate(buffers.layout.chunks[chunk]):
            for run in ranges if owner != self._world.rank else ():
                residual = self._residuals[run.parameter][run.of_parameter]
                self._codec.encode(bucket.flat[run.of_bucket], residual, buffers.parts[chunk, owner, run.of_records])
        target, source = buffers.received[chunk].view(-1), buffers.parts[chunk].view(-1)
        return begun(dist.all_to_all_single(target, source, group=self._world.group, async_op=True))

    def _reduce_and_gather(
        self, bucket: Bucket, buffers: _BucketBuffers, chunk: int, scattered: dist.Work
    ) -> dist.Work:
        await_work(scattered, self._world.release)
        received = [buffers.received[chunk, rank] for rank in range(self._world.size) if rank != self._world.rank]
        for run in buffers.layout.chunks[chunk][self._world.rank]:
            residual = self._residuals[run.parameter][run.of_parameter]
            others = [records[run.of_records] for records in received]
            self._codec.reduce(bucket.flat[run.of_bucket], residual, others, buffers.own[chunk, run.of_records])
        # By the group itself: the public function of this name changed between the supported versions of torch.
        return self._world.group._allgather_base(buffers.parts[chunk].view(-1), buffers.own[chunk].view(-1))


# Which rank sums which part of a bucket, and where each part lies in the messages. Every parameter is cut into blocks,
# and its blocks into one part per rank. That depends on the parameter alone, never on its bucket: DDP arranges its
# buckets anew after the first backward and after a resume, and neither scales nor residuals may change with that.


@dataclass(frozen=True)
class ElementRange:
    """Neighbouring elements of one parameter that travel in one chunk to one owner."""

    parameter: int
    start: int  # in the parameter
    offset: int  # in the bucket
    count: int
    record: int  # the first record, in the chunk

    @property
    def of_parameter(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def of_bucket(self) -> slice:
        return slice(self.offset, self.offset + self.count)

    @property
    def of_records(self) -> slice:
        return slice(self.record, self.record + blocks_of(self.count))


@dataclass(frozen=True)
class ScatterLayout:
    # chunks[k][r] is what chunk k has for owner r.
    chunks: tuple[tuple[tuple[ElementRange, ...], ...], ...]
    # Every chunk has room for this many blocks for each owner.
    records: int


def lay_out(bucket: Sequence[tuple[int, int]], world_size: int, record_bytes: int) -> ScatterLayout:
    """Lay out a bucket, given as the number and the size of each parameter in order."""
    parts = [list(_part_of_owner(bucket, owner, world_size)) for owner in range(world_size)]
    longest = max(1, *(sum(blocks_of(run.count) for run in part) for part in parts))
    chunk_count = -(-longest * record_bytes // _CHUNK_BYTES)
    records = -(-longest // chunk_count)
    cut = [[piece for run in part for piece in _cut_at_chunks(run, records)] for part in parts]
    chunks = tuple(
        tuple(tuple(run for chunk, run in part if chunk == number) for part in cut) for number in range(chunk_count)
    )
    return ScatterLayout(chunks, records)


def _part_of_owner(bucket: Sequence[tuple[int, int]], owner: int, world_size: int) -> Iterator[ElementRange]:
    """Yield the ranges of one owner, with records numbered over the whole bucket.

    The owner of the first part changes from one parameter to the next, so that small remainders don't all go to one
    rank.
    """
    offset = record = 0
    for parameter, size in bucket:
        blocks, turn = blocks_of(size), (owner + parameter) % world_size
        start = BLOCK * (blocks * turn // world_size)
        end = min(size, BLOCK * (blocks * (turn + 1) // world_size))
        if start < end:
            yield ElementRange(parameter, start, offset + start, end - start, record)
            record += blocks_of(end - start)
        offset += size


def _cut_at_chunks(run: ElementRange, records: int) -> Iterator[tuple[int, ElementRange]]:
    """Cut a range where chunks end; yield the chunk's number and the part, with its record counted from the chunk."""
    done = 0
    while done < run.count:
        chunk, record = divmod(run.record + done // BLOCK, records)
        count = min(run.count - done, BLOCK * (records - record))
        yield chunk, replace(run, start=run.start + done, offset=run.offset + done, count=count, record=record)
        done += count


# Exchanges of several rounds, started in the same order on every rank. gloo matches the collectives of two ranks by the
# order in which each rank started them. A second round that is started from a callback of the first starts whenever
# that ends: before the next bucket on one rank and after it on another. So one thread takes buckets as backward hands
# them over, and gives turns: in the turn of bucket k, k starts its first round, k-1 its second and so on. The order is
# fixed, and while one bucket is on the wire another one is computed on.

# Each `yield` ends a turn: collectives were started, and their results are waited for in the next turn.
Rounds = Generator[None, None, None]


@dataclass
class _Job:
    rounds: Rounds
    bucket: Bucket
    done: Future[None] = field(default_factory=Future)
    error: Exception | None = None

    def result(self, _: object) -> Tensor:
        """Return the sum, as a callback: an error raised here reaches DDP; `set_exception` would pass it as a value."""
        if self.error is not None:
            raise self.error
        return self.bucket.flat

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def advance(self) -> bool:
        """Run one round; return whether there are more."""
        try:
            next(self.rounds)
        except StopIteration:
            self.finish()
            return False
        return True


class OrderedQueue:
    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, rounds: Rounds, bucket: Bucket) -> Future[Tensor]:
        if self._thread is None:
            self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="wire", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        job = _Job(rounds, bucket)
        result: Future[Tensor] = job.done.then(job.result)
        self._jobs.put(job)
        return result


@torch.no_grad()
def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    compute_alone()
    running: list[_Job] = []
    while (job := jobs.get()) is not None:
        running = _take_turns([*running, job])
        while running and job.bucket.is_last:
            running = _take_turns(running)


def _take_turns(running: list[_Job]) -> list[_Job]:
    """Advance all jobs, the newest first: its messages travel while the older ones compute. Return the unfinished ones,
    oldest first."""
    try:
        unfinished = [job for job in reversed(running) if job.advance()]
    except Exception as error:  # it belongs to those who wait for the jobs, not to this thread
        for job in running:
            job.error = job.error or error
            job.finish()
        return []
    return unfinished[::-1]

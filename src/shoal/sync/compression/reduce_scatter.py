"""Sums in fp32 with less on the wire: every rank adds up its own part of each bucket, and sends the result to all.

The first round is a reduce-scatter (by all-to-all: gloo's own costs more than an all-reduce), the second an all-gather,
both in pieces, so that one is encoded while another travels. Each rank sends 2(N-1)/N of the bucket, as in a ring. A
rank's own part is never rounded before it is added up, and what is sent back is what its owner rounded, on every rank:
all get the same bits, whatever their processors are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.cost.model_size import BLOCK, blocks_of
from shoal.sync.compression.base import Bucket, BufferPool, State, begun, load_tensors
from shoal.sync.interruptible import await_work
from shoal.sync.world import World

# SECTION sync/wires/layout
# Which rank adds up which part of a bucket, and where each part lies on the wire.
#
# Every parameter is cut into blocks, and its blocks into one part a rank. That depends on the parameter alone, never on
# the bucket it travels in: DDP arranges its buckets anew after the first backward and after a resume, and neither the
# scales nor what an owner keeps for next time may change with that.


# gloo moves large messages at half the link's speed, and many of this size at a time at 92% of it.
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class ElementRange:
    """Neighbouring elements of one parameter that travel in one piece to one owner."""

    parameter: int
    start: int
    offset: int
    count: int
    record: int

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
    """`pieces[k][r]` is what piece k has for owner r; every one of them has room for `records` blocks."""

    pieces: tuple[tuple[tuple[ElementRange, ...], ...], ...]
    records: int


def lay_out(bucket: Sequence[tuple[int, int]], world_size: int, record_bytes: int) -> ScatterLayout:
    """`bucket` has the number and the size of each parameter, in the order in which they lie in it."""
    parts = [list(_part(bucket, owner, world_size)) for owner in range(world_size)]
    longest = max(1, *(sum(blocks_of(run.count) for run in part) for part in parts))
    count = -(-longest * record_bytes // _PIECE_BYTES)
    each = -(-longest // count)
    cut = [[run for whole in part for run in _cut(whole, each)] for part in _placed(parts)]
    pieces = tuple(
        tuple(tuple(run for piece, run in part if piece == number) for part in cut) for number in range(count)
    )
    return ScatterLayout(pieces, each)


def _part(bucket: Sequence[tuple[int, int]], owner: int, world_size: int) -> Iterator[ElementRange]:
    """The owner of the first part changes from one parameter to the next, so that crumbs don't all go to one rank."""
    offset = 0
    for parameter, size in bucket:
        blocks, turn = blocks_of(size), (owner + parameter) % world_size
        start = BLOCK * (blocks * turn // world_size)
        end = min(size, BLOCK * (blocks * (turn + 1) // world_size))
        if start < end:
            yield ElementRange(parameter, start, offset + start, end - start, 0)
        offset += size


def _placed(parts: list[list[ElementRange]]) -> Iterator[list[ElementRange]]:
    """Behind one another on the wire."""
    for part in parts:
        record, placed = 0, []
        for run in part:
            placed.append(ElementRange(run.parameter, run.start, run.offset, run.count, record))
            record += blocks_of(run.count)
        yield placed


def _cut(run: ElementRange, each: int) -> Iterator[tuple[int, ElementRange]]:
    """Where pieces end; with the number of the piece, and the record counted from its beginning."""
    done = 0
    while done < run.count:
        piece, record = divmod(run.record + done // BLOCK, each)
        count = min(run.count - done, BLOCK * (each - record))
        yield piece, ElementRange(run.parameter, run.start + done, run.offset + done, count, record)
        done += count


# SECTION sync/wires/lane
# Exchanges of several rounds, started in the same order on every rank.
#
# gloo pairs the collectives of two ranks by the order in which each rank started them. A second round that is started
# from a callback of the first starts whenever that happens to end, before the next bucket on one rank and behind it on
# another. A lane is one thread that takes buckets as backward hands them over, and gives out turns: in the turn of
# bucket k, k starts its first round, k-1 its second and so on. So the order is fixed, and while one bucket is on the
# wire another one is computed on.


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


class OrderedQueue:
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


class Codec(Protocol):
    """Blocks of numbers as records of bytes. `records` has a row for each block; the last block may be shorter.

    `residual` is what earlier steps could not say, and afterwards what this one could not; empty for a codec that keeps
    none. `gradient` may be used up by `settle`: the result comes with `spread`.
    """

    record_bytes: int
    keeps_residual: bool

    def send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None: ...
    def settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None: ...
    def spread(self, records: Tensor, gradient: Tensor) -> None: ...


@dataclass(frozen=True)
class _BucketBuffers:
    """What a bucket needs in every step: who gets what, and room for it, piece by piece and rank by rank.

    `parts` holds what goes to each owner, and after that what each owner sends back.
    """

    layout: ScatterLayout
    parts: Tensor
    received: Tensor
    own: Tensor


class ReduceScatter:
    def __init__(self, world: World, parameters: Mapping[str, Tensor], codec: Codec) -> None:
        self._world = world
        self._codec = codec
        self._lane = OrderedQueue()
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        self._residuals = [torch.zeros(each.numel() * codec.keeps_residual) for each in parameters.values()]
        self._desks = BufferPool(self._make_desk)

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._lane.take(self._rounds(bucket, self._desks.of(bucket)), bucket)

    def state(self) -> dict[str, Tensor]:
        if not self._codec.keeps_residual:
            return {}
        kept = zip(self._shapes.items(), self._residuals, strict=True)
        return {f"residual.{name}": residual.view(shape) for (name, shape), residual in kept}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def _make_desk(self, bucket: Bucket) -> _BucketBuffers:
        members = [(self._numbers[id(parameter)], parameter.numel()) for parameter in bucket.parameters]
        layout = lay_out(members, self._world.size, self._codec.record_bytes)
        one = (layout.records, self._codec.record_bytes)
        for_all = (len(layout.pieces), self._world.size, *one)
        parts, received = (torch.zeros(for_all, dtype=torch.int8) for _ in range(2))
        return _BucketBuffers(layout, parts, received, torch.zeros(len(layout.pieces), *one, dtype=torch.int8))

    def _rounds(self, bucket: Bucket, desk: _BucketBuffers) -> Rounds:
        pieces = range(len(desk.layout.pieces))
        sent = [self._scatter(bucket, desk, piece) for piece in pieces]
        yield
        back = [self._gather(bucket, desk, piece, sent[piece]) for piece in pieces]
        yield
        for piece in pieces:
            self._spread(bucket, desk, piece, back[piece])

    def _scatter(self, bucket: Bucket, desk: _BucketBuffers, piece: int) -> dist.Work:
        for owner, runs in enumerate(desk.layout.pieces[piece]):
            for run in runs if owner != self._world.rank else ():
                residual = self._residuals[run.parameter][run.of_parameter]
                self._codec.send(bucket.flat[run.of_bucket], residual, desk.parts[piece, owner, run.of_records])
        target, source = desk.received[piece].view(-1), desk.parts[piece].view(-1)
        return begun(dist.all_to_all_single(target, source, group=self._world.group, async_op=True))

    def _gather(self, bucket: Bucket, desk: _BucketBuffers, piece: int, sent: dist.Work) -> dist.Work:
        await_work(sent, self._world.release)
        theirs = [desk.received[piece, rank] for rank in range(self._world.size) if rank != self._world.rank]
        for run in desk.layout.pieces[piece][self._world.rank]:
            residual = self._residuals[run.parameter][run.of_parameter]
            others = [records[run.of_records] for records in theirs]
            self._codec.settle(bucket.flat[run.of_bucket], residual, others, desk.own[piece, run.of_records])
        # By the group itself: the public function of this name changed between the versions of torch that we allow.
        return self._world.group._allgather_base(desk.parts[piece].view(-1), desk.own[piece].view(-1))

    def _spread(self, bucket: Bucket, desk: _BucketBuffers, piece: int, back: dist.Work) -> None:
        await_work(back, self._world.release)
        for owner, runs in enumerate(desk.layout.pieces[piece]):
            for run in runs:
                self._codec.spread(desk.parts[piece, owner, run.of_records], bucket.flat[run.of_bucket])

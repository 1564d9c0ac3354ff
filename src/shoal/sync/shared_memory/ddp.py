"""SharedDDP: gradients that live in shared memory from the moment backward makes them, so nothing is copied in or out.

What DDP does with its reducer: gradients are views of a flat buffer, a bucket is summed as soon as backward has filled
it, and only the last micro-batch of a step sends. Every rank sums its slice of all ranks' buckets and writes the result
into each of them, so that clipping and the optimizer find their own copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import Future as Done
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future as FuturesFuture

from shoal.sync.compression.base import Bucket, Compressor, NoState, State
from shoal.sync.shared_memory.group import HostSharing, InsideChoice
from shoal.sync.step_stats import CommTimes, covered

# SECTION sync/shared/pipeline
# In the background and in order: sum inside the machine, then over the wire between machines, then spread inside.
#
# Backward goes on meanwhile. Two threads at most, one a host_barrier, so that the next bucket is summed inside while
# this
# one is on the wire.


P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Content = TypeVar("Content", contravariant=True)

# What a wire is handed of an item, once it is summed inside the machine.
AsBucket = Callable[[Tensor], Bucket]


class HostSum(Protocol[Content]):
    """One way to sum through shared memory; all ranks of a machine call it with the same things in the same order."""

    def sum(self, item: Content, for_all: bool) -> Tensor:
        """The sum over this machine: on all its ranks, or on the first alone."""
        ...

    def spread(self, item: Content) -> None:
        """What the first rank has now, on all of them."""
        ...


class Pipeline(Generic[Item]):
    """`wire` is what the first rank of a machine sends its sums by, and nobody else."""

    def __init__(self, together: HostSharing, summing: HostSum[Item], wire: Compressor | None) -> None:
        self._machines = len(together.kin.firsts)
        self._summing = summing
        self._wire = wire
        self._together = together
        self._inside = PipelineStage("inside", together.close)
        self._spread = PipelineStage("spread", together.close)

    def put(self, item: Item, as_bucket: AsBucket) -> Future[float]:
        """When it was done, by perf_counter."""
        if self._machines == 1:
            return self._inside.do(self._sum, item)
        sent = self._inside.do(self._sum_and_send, item, as_bucket)
        return self._spread.do(self._receive, item, sent)

    def close(self) -> None:
        """With nothing under way."""
        for stage in (self._inside, self._spread):
            stage.end()
        self._together.close()

    def _sum(self, item: Item) -> float:
        self._summing.sum(item, for_all=True)
        return time.perf_counter()

    def _sum_and_send(self, item: Item, as_bucket: AsBucket) -> Callable[[], None]:
        flat = self._summing.sum(item, for_all=False)
        if self._wire is None:
            return lambda: None
        arriving = self._wire(as_bucket(flat))

        def receive() -> None:
            arrived = arriving.wait()
            if arrived.data_ptr() != flat.data_ptr():
                flat.copy_(arrived)

        return receive

    def _receive(self, item: Item, sent: Future[Callable[[], None]]) -> float:
        sent.result()()
        self._summing.spread(item)
        return time.perf_counter()


class PipelineStage:
    """One thread, one thing after another. Once something failed nothing else is tried: after a deadline has passed,
    every later thing would wait for another one."""

    def __init__(self, name: str, give_up: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._give_up = give_up
        self._failed: Exception | None = None

    def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self._try, partial(work, *args, **kwargs))

    def end(self) -> None:
        self._threads.shutdown()

    def _try(self, work: Callable[[], T]) -> T:
        if self._failed is not None:
            raise self._failed
        try:
            return work()
        except Exception as error:
            self._failed = error
            self._give_up()
            raise


# SECTION sync/shared/slices
# Summing rows of shared memory: each rank sums one slice of all rows, in the order of the ranks.
#
# So every element is added up once, by one rank, in one order: all replicas get the same bits.


# Two ranks never write to one cache line (64 bytes, and 128 on some machines), for elements of two bytes and more.
_LINE = 64
# All rows' parts and the sum stay in the cache. A call takes some microseconds: blocks of 128 kB, which a core's own
# cache would hold, took 1.7 times as long in all (measured, four ranks).
BLOCK_BYTES = 1 << 20


def slice_of(begin: int, end: int, index: int, count: int) -> tuple[int, int]:
    """The part of `[begin, end)` that the rank with this index sums; empty where there is too little for all."""
    each = -(-(end - begin) // (count * _LINE)) * _LINE
    low = min(end, begin + index * each)
    return low, min(end, low + each)


def sum_rows(rows: Sequence[Tensor], low: int, high: int, into: Sequence[Tensor], scratch: Tensor) -> None:
    """Puts the sum over all rows of `[low, high)` in the same place of the rows `into`."""
    if low >= high:
        return
    sources, targets = ([row[low:high].split(len(scratch)) for row in each] for each in (rows, into))
    for first, second, *others, in_all in zip(*sources, zip(*targets, strict=True), strict=True):
        total = scratch[: len(first)]
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        for target in in_all:
            target.copy_(total)


def scratch_for(dtype: torch.dtype) -> Tensor:
    return torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)


# SECTION sync/shared/layout
# Where each gradient lies in a row of shared memory, and which of them travel together. Arithmetic only.


Range = tuple[int, int]


@dataclass(frozen=True)
class RowLayout:
    """In elements. `begins` and `bucket_of` are by tensor."""

    begins: tuple[int, ...]
    bucket_of: tuple[int, ...]
    buckets: tuple[Range, ...]

    @property
    def elements(self) -> int:
        return self.buckets[-1][1]


def lay_out(sizes: Sequence[int], bucket_elements: float) -> RowLayout:
    """In the given order; a bucket is closed by the tensor that fills it, as in DDP."""
    begins, bucket_of = [], []
    buckets: list[Range] = []
    begin = end = 0
    for number, size in enumerate(sizes, start=1):
        begins.append(end)
        bucket_of.append(len(buckets))
        end += size
        if end - begin >= bucket_elements or number == len(sizes):
            buckets.append((begin, end))
            begin = end = -(-end // _LINE) * _LINE
    return RowLayout(tuple(begins), tuple(bucket_of), tuple(buckets))


class ResidentSum:
    """Sums ranges of the rows in place."""

    def __init__(self, together: HostSharing, rows: tuple[Tensor, ...]) -> None:
        self._kin = together.kin
        self._lanes = together.lanes
        self._rows = rows
        self._scratch = scratch_for(rows[0].dtype)

    def sum(self, item: Range, for_all: bool) -> Tensor:
        if self._kin.size > 1:
            self._lanes[0].arrive()
            into = self._rows if for_all else self._rows[:1]
            sum_rows(self._rows, *slice_of(*item, self._kin.index, self._kin.size), into, self._scratch)
            self._lanes[0].arrive()
        return self._rows[self._kin.index][slice(*item)]

    def spread(self, item: Range) -> None:
        """The second round: the first rank must not begin its next step while somebody still reads from its row."""
        self._lanes[1].arrive()
        if not self._kin.is_first:
            self._rows[self._kin.index][slice(*item)].copy_(self._rows[0][slice(*item)])
        self._lanes[1].arrive()


class SharedDDP:
    extra_bytes = 0

    def __init__(
        self, model: nn.Module, together: HostSharing, layout: RowLayout, wire: Compressor | None, timed: bool = True
    ) -> None:
        self.module = model
        self.inside = InsideChoice("shared")
        self._timed = timed
        parameters = in_order(model)
        rows = together.memory.rows(parameters[0].dtype)
        own = rows[together.kin.index]
        self._views: dict[Tensor, Tensor] = {
            parameter: own[begin : begin + parameter.numel()].view(parameter.shape)
            for parameter, begin in zip(parameters, layout.begins, strict=True)
        }
        self._bucket_of: dict[Tensor, int] = dict(zip(parameters, layout.bucket_of, strict=True))
        self._buckets = layout.buckets
        self._parameters: list[list[Tensor]] = [[] for _ in layout.buckets]
        for parameter, bucket in self._bucket_of.items():
            self._parameters[bucket].append(parameter)
        self._pipeline = Pipeline(together, ResidentSum(together, rows), wire)
        self._wire: Compressor | NoState = wire or NoState()
        self._is_last = False
        self._start_over()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters]

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._is_last = last
        return nullcontext()

    def finish(self) -> CommTimes:
        while len(self._sent) < len(self._buckets):
            for parameter in self._missing[len(self._sent)]:
                self._fill(parameter)
            self._send()
        spans = [[begin, done.result()] for begin, done in self._sent]
        self._start_over()
        now = time.perf_counter()
        return CommTimes(spans[-1][0], now - spans[-1][0], covered(spans)) if self._timed else CommTimes(now, 0.0, None)

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)

    def close(self) -> None:
        """When all ranks are through with their last bucket."""
        for hook in self._hooks:
            hook.remove()
        self._pipeline.close()

    def _start_over(self) -> None:
        self._sent: list[tuple[float, Future[float]]] = []
        self._missing: list[set[Tensor]] = [set() for _ in self._buckets]
        for parameter, bucket in self._bucket_of.items():
            self._missing[bucket].add(parameter)

    def _take(self, parameter: Tensor) -> None:
        """After every backward: a gradient that autograd has just allocated moves to its place, once a step."""
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._is_last:
            self._missing[self._bucket_of[parameter]].discard(parameter)
            self._send_full()

    def _send_full(self) -> None:
        """In the order of the buckets, whichever was full first: all ranks must send the same ones alike."""
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        index = len(self._sent)
        done = self._pipeline.put(self._buckets[index], partial(self._as_bucket, index))
        self._sent.append((time.perf_counter(), done))

    def _as_bucket(self, index: int, flat: Tensor) -> Bucket:
        return Bucket(index, flat, self._parameters[index], is_last=index == len(self._buckets) - 1)

    def _fill(self, parameter: Tensor) -> None:
        """The last backward did not touch it here; others may have a gradient for it."""
        if parameter.grad is None:
            parameter.grad = self._views[parameter].zero_()


def in_order(model: nn.Module) -> list[nn.Parameter]:
    """About as backward completes them: last layer first."""
    return [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]


# SECTION sync/shared/copies
# Summing tensors that live elsewhere, DDP's buckets for one: copied in, summed, copied out, a chunk at a time.


# Each costs two rounds through the host_barrier, and that every rank is woken for them: with 2 MB a sum of 64 MB took
# 1.6
# times the time of processors (measured, four ranks on two cores), with 16 MB a tenth less.
CHUNK_BYTES = 8 << 20


class DoubleSlots:
    """Two places in every row, used in turn: while somebody still reads a chunk from one, the next goes into the other.

    Nobody writes to the first again before all have come with the second, and they come when they have read.
    """

    def __init__(self, together: HostSharing, pair: int) -> None:
        self._memory = together.memory
        self._pair = pair
        self._turn = 0

    def next(self, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        self._turn ^= 1
        begin = (2 * self._pair + self._turn) * CHUNK_BYTES // dtype.itemsize
        return tuple(row[begin : begin + length] for row in self._memory.rows(dtype))


class CopySum:
    def __init__(self, together: HostSharing) -> None:
        self._kin = together.kin
        self._lanes = together.lanes
        self._summing, self._spreading = DoubleSlots(together, 0), DoubleSlots(together, 1)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def sum(self, item: Tensor, for_all: bool) -> Tensor:
        for part in _chunks(item) if self._kin.size > 1 else ():
            rows = self._summing.next(len(part), part.dtype)
            rows[self._kin.index].copy_(part)
            self._lanes[0].arrive()
            self._sum_slice(rows)
            self._lanes[0].arrive()
            if for_all or self._kin.is_first:
                for low, high, row in self._slices(rows):
                    part[low:high].copy_(row[low:high])
        return item

    def spread(self, item: Tensor) -> None:
        for part in _chunks(item) if self._kin.size > 1 else ():
            first = self._spreading.next(len(part), part.dtype)[0]
            if self._kin.is_first:
                first.copy_(part)
            self._lanes[1].arrive()
            if not self._kin.is_first:
                part.copy_(first)

    def _sum_slice(self, rows: tuple[Tensor, ...]) -> None:
        own = rows[self._kin.index]
        if own.dtype not in self._scratch:
            self._scratch[own.dtype] = scratch_for(own.dtype)
        sum_rows(rows, *slice_of(0, len(own), self._kin.index, self._kin.size), [own], self._scratch[own.dtype])

    def _slices(self, rows: tuple[Tensor, ...]) -> Iterator[tuple[int, int, Tensor]]:
        for index, row in enumerate(rows):
            yield *slice_of(0, len(row), index, self._kin.size), row


class SharedCompressor:
    """A wire format for the ranks of one machine: takes a bucket, returns a future of its sum over the world."""

    def __init__(self, together: HostSharing, wire: Compressor | None) -> None:
        self._wire: Compressor | NoState = wire or NoState()
        self._pipeline = Pipeline(together, CopySum(together), wire)

    def __call__(self, bucket: Bucket) -> FuturesFuture[Tensor]:
        done = self._pipeline.put(bucket.flat, lambda flat: replace(bucket, flat=flat))
        return _as_torch(done, bucket.flat)

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def close(self) -> None:
        """When all ranks are through with their last bucket."""
        self._pipeline.close()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)


def row_bytes(machines: int) -> int:
    return 2 * CHUNK_BYTES * (1 if machines == 1 else 2)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split(CHUNK_BYTES // flat.itemsize)
    return parts


def _as_torch(done: Done[float], bucket: Tensor) -> FuturesFuture[Tensor]:
    """An error must reach DDP from inside a callback: one set on the future itself would pass for its value."""
    settled: FuturesFuture[Tensor] = FuturesFuture()

    def unwrap(_: FuturesFuture[Tensor]) -> Tensor:
        done.result()
        return bucket

    handed: FuturesFuture[Tensor] = settled.then(unwrap)
    done.add_done_callback(lambda _: settled.set_result(bucket))
    return handed

"""Sums gradients through memory that the ranks of one host share.

    SharedDDP          gradients live in shared memory from the moment backward makes them: nothing is copied in or out
    SharedCompressor   sums tensors that live elsewhere, such as DDP's buckets: copied in, summed, copied out

Gradients are views of a flat buffer. Every rank sums its slice of all ranks' buffers and writes the result into each of
them, so that clipping and the optimizer find their own copy. On one host the thread that computes does this after
backward, with all its threads: the sum needs the cores that backward computes on, so there is nothing to overlap with.
With several hosts a bucket is summed and sent as soon as backward has filled it, as DDP does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future as TorchFuture

from shoal.sync.compression.base import Bucket, Compressor, CompressorState, NoState
from shoal.sync.helper_threads import compute_alone
from shoal.sync.interruptible import await_future
from shoal.sync.shared_memory.group import HostSharing, InsideChoice
from shoal.sync.step_stats import CommTimes, covered

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Content = TypeVar("Content", contravariant=True)

Range = tuple[int, int]
# Turns an item's sum over the host into the bucket that is sent between hosts.
AsBucket = Callable[[Tensor], Bucket]

# Two ranks never write to one cache line (64 bytes, 128 on some machines), for elements of two bytes and more.
_LINE_ELEMENTS = 64
# For each thread. The parts of all rows and their sum stay in the cache. A call takes some microseconds: blocks of 128
# kB, which a core's own cache would hold, took 1.7 times as long in all (measured, four ranks).
BLOCK_BYTES = 1 << 20
# Each chunk costs two barriers, which wake every rank: with 2 MB a sum of 64 MB took 1.6 times the processor time
# (measured, four ranks on two cores), with 16 MB a tenth less.
CHUNK_BYTES = 8 << 20


class SharedDDP(CompressorState):
    can_leave_out = False
    extra_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        sharing: HostSharing,
        layout: RowLayout,
        compressor: Compressor | None,
        timed: bool = True,
    ) -> None:
        self.module = model
        self.inside = InsideChoice("shared")
        self._timed = timed
        parameters = in_backward_order(model)
        rows = sharing.memory.rows(parameters[0].dtype)
        own = rows[sharing.group.index]
        self._views: dict[Tensor, Tensor] = {
            parameter: own[begin : begin + parameter.numel()].view(parameter.shape)
            for parameter, begin in zip(parameters, layout.begins, strict=True)
        }
        self._bucket_of: dict[Tensor, int] = dict(zip(parameters, layout.bucket_of, strict=True))
        self._buckets = layout.buckets
        self._parameters: list[list[Tensor]] = [[] for _ in layout.buckets]
        for parameter, bucket in self._bucket_of.items():
            self._parameters[bucket].append(parameter)
        self._sharing = sharing
        self._sum = ResidentSum(sharing, rows)
        is_one_host = len(sharing.group.first_ranks) == 1
        self._pipeline = None if is_one_host else Pipeline(sharing, self._sum, compressor)
        self._compressor = compressor or NoState()
        self._is_last = False
        self._ready_at = 0.0  # the end of the last backward, by perf_counter
        self._start_step()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]

    def loss_scale(self, global_count: int) -> float:
        return 1.0 / global_count

    def backward(self, loss: Tensor, last: bool) -> None:
        self._is_last = last
        loss.backward()
        self._ready_at = time.perf_counter()

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        if self._pipeline is None:
            return self._sum_on_this_host()
        while len(self._sent) < len(self._buckets):
            self._fill_in_zeros(self._missing[len(self._sent)])
            self._send_next(self._pipeline)
        spans = [[begin, done.result()] for begin, done in self._sent]
        self._start_step()
        now = time.perf_counter()
        return CommTimes(spans[-1][0], now - spans[-1][0], covered(spans)) if self._timed else CommTimes(now, 0.0, None)

    def _sum_on_this_host(self) -> CommTimes:
        self._fill_in_zeros(self._views)
        arrived_at = time.perf_counter()
        together_at = self._sum.sum_in_place((0, self._buckets[-1][1]))
        now = time.perf_counter()
        if not self._timed:
            return CommTimes(now, 0.0, None)
        # The tail begins with the last gradient, as in DDP; the engine takes out what the program did since.
        return CommTimes(self._ready_at, now - self._ready_at, now - together_at, wait_s=together_at - arrived_at)

    def _fill_in_zeros(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                # The last backward did not use it here; other ranks may have a gradient for it.
                parameter.grad = self._views[parameter].zero_()

    def resize(self, tokens: int) -> None:
        pass

    def close(self) -> None:
        """Close the pipeline, after the last bucket of all ranks."""
        for hook in self._hooks:
            hook.remove()
        if self._pipeline is None:
            self._sharing.close()
        else:
            self._pipeline.close()

    def _start_step(self) -> None:
        self._sent: list[tuple[float, Future[float]]] = []
        self._missing: list[set[Tensor]] = [set() for _ in self._buckets]
        for parameter, bucket in self._bucket_of.items():
            self._missing[bucket].add(parameter)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Move a gradient that autograd has newly allocated into its place, and send full buckets."""
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._is_last and self._pipeline is not None:
            self._missing[self._bucket_of[parameter]].discard(parameter)
            # In the order of the buckets, whichever is full first: all ranks must send in the same order.
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send_next(self._pipeline)

    def _send_next(self, pipeline: Pipeline[Range]) -> None:
        index = len(self._sent)
        done = pipeline.put(self._buckets[index], partial(self._as_bucket, index))
        self._sent.append((time.perf_counter(), done))

    def _as_bucket(self, index: int, flat: Tensor) -> Bucket:
        return Bucket(index, flat, self._parameters[index], is_last=index == len(self._buckets) - 1)


def in_backward_order(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters roughly in the order in which backward completes them: last layer first."""
    return [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]


class SharedCompressor(CompressorState):
    """A compressor for DDP's buckets that sums through shared memory inside a host."""

    def __init__(self, sharing: HostSharing, compressor: Compressor | None) -> None:
        self._compressor = compressor or NoState()
        self._pipeline = Pipeline(sharing, CopySum(sharing), compressor)

    def __call__(self, bucket: Bucket) -> TorchFuture[Tensor]:
        done = self._pipeline.put(bucket.flat, lambda flat: replace(bucket, flat=flat))
        outcome: TorchFuture[Tensor] = TorchFuture()

        def unwrap(_: TorchFuture[Tensor]) -> Tensor:
            # An error must be raised in a callback to reach DDP: set on the future it would pass for a value.
            done.result()
            return bucket.flat

        result: TorchFuture[Tensor] = outcome.then(unwrap)
        done.add_done_callback(lambda _: outcome.set_result(bucket.flat))
        return result

    def close(self) -> None:
        """Close the pipeline, after the last bucket of all ranks."""
        self._pipeline.close()


# In the background and in order: sum inside the host, send between hosts, distribute inside the host. Backward
# continues meanwhile. Two threads, each with its own barrier, so that the next bucket is summed while this one is on
# the wire.


class HostSum(Protocol[Content]):
    """A sum through shared memory. All ranks of a host call it with the same items in the same order."""

    def sum(self, item: Content, for_all: bool) -> Tensor:
        """Return the sum over this host: on all its ranks, or only on the first."""

    def distribute(self, item: Content) -> None:
        """Copy the first rank's content to all ranks of the host."""


class Pipeline(Generic[Item]):
    def __init__(self, sharing: HostSharing, host_sum: HostSum[Item], compressor: Compressor | None) -> None:
        self._hosts = len(sharing.group.first_ranks)
        self._host_sum = host_sum
        # Sends the host's sums to other hosts; None on all but the first rank of a host.
        self._compressor = compressor
        self._sharing = sharing
        self._sum_stage = PipelineStage("sum inside", sharing.close)
        self._distribute_stage = PipelineStage("distribute", sharing.close)

    def put(self, item: Item, as_bucket: AsBucket) -> Future[float]:
        """Start an exchange; return a future of the time when it was done, by perf_counter."""
        if self._hosts == 1:
            return self._sum_stage.submit(self._sum, item)
        sent = self._sum_stage.submit(self._sum_and_send, item, as_bucket)
        return self._distribute_stage.submit(self._receive_and_distribute, item, sent)

    def close(self) -> None:
        """Stop the threads, with no exchange under way."""
        for stage in (self._sum_stage, self._distribute_stage):
            stage.close()
        self._sharing.close()

    def _sum(self, item: Item) -> float:
        self._host_sum.sum(item, for_all=True)
        return time.perf_counter()

    def _sum_and_send(self, item: Item, as_bucket: AsBucket) -> Callable[[], None]:
        flat = self._host_sum.sum(item, for_all=False)
        if self._compressor is None:
            return lambda: None
        pending = self._compressor(as_bucket(flat))

        def receive() -> None:
            received = await_future(pending)
            if received.data_ptr() != flat.data_ptr():
                flat.copy_(received)

        return receive

    def _receive_and_distribute(self, item: Item, sent: Future[Callable[[], None]]) -> float:
        receive = sent.result()
        receive()
        self._host_sum.distribute(item)
        return time.perf_counter()


class PipelineStage:
    """One thread that does one task after another.

    After a failure it refuses all later tasks: each of them would wait for another timeout.
    """

    def __init__(self, name: str, on_failure: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=compute_alone)
        self._on_failure = on_failure
        self._failed: Exception | None = None

    def submit(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self._run, partial(task, *args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, task: Callable[[], T]) -> T:
        if self._failed is not None:
            raise self._failed
        try:
            return task()
        except Exception as error:
            self._failed = error
            self._on_failure()
            raise


# Summing rows of shared memory: each rank sums one slice of all rows, in the order of the ranks. Every element is added
# up once, by one rank, in one order: all replicas get the same bits.


def slice_of(begin: int, end: int, index: int, count: int) -> Range:
    """Return the part of `[begin, end)` that the rank with this index sums; empty where there is too little for all."""
    length = -(-(end - begin) // (count * _LINE_ELEMENTS)) * _LINE_ELEMENTS
    low = min(end, begin + index * length)
    return low, min(end, low + length)


def sum_rows(rows: Sequence[Tensor], low: int, high: int, into: Sequence[Tensor], scratch: Tensor) -> None:
    """Write the sum over all rows of `[low, high)` to the same place of the rows `into`."""
    if low >= high:
        return
    sources, targets = ([row[low:high].split(len(scratch)) for row in tensors] for tensors in (rows, into))
    for first, second, *others, block_targets in zip(*sources, zip(*targets, strict=True), strict=True):
        total = scratch[: len(first)]
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        for target in block_targets:
            target.copy_(total)


def _make_scratch(dtype: torch.dtype) -> Tensor:
    return torch.empty(torch.get_num_threads() * BLOCK_BYTES // dtype.itemsize, dtype=dtype)


@dataclass(frozen=True)
class RowLayout:
    """Where each gradient lies in a row of shared memory, and which of them travel together. In elements."""

    begins: tuple[int, ...]  # by tensor
    bucket_of: tuple[int, ...]  # by tensor
    buckets: tuple[Range, ...]

    @property
    def elements(self) -> int:
        return self.buckets[-1][1]


def lay_out_rows(sizes: Sequence[int], bucket_elements: float) -> RowLayout:
    """Lay out tensors in the given order; the tensor that fills a bucket closes it, as in DDP."""
    begins, bucket_of = [], []
    buckets: list[Range] = []
    begin = end = 0
    for number, size in enumerate(sizes, start=1):
        begins.append(end)
        bucket_of.append(len(buckets))
        end += size
        if end - begin >= bucket_elements or number == len(sizes):
            buckets.append((begin, end))
            begin = end = -(-end // _LINE_ELEMENTS) * _LINE_ELEMENTS
    return RowLayout(tuple(begins), tuple(bucket_of), tuple(buckets))


class ResidentSum:
    """Sums ranges of the rows in place."""

    def __init__(self, sharing: HostSharing, rows: tuple[Tensor, ...]) -> None:
        self._group = sharing.group
        self._barriers = sharing.barriers
        self._rows = rows
        self._scratch = _make_scratch(rows[0].dtype)

    def sum(self, item: Range, for_all: bool) -> Tensor:
        if self._group.size > 1:
            self.sum_in_place(item, self._rows if for_all else self._rows[:1])
        return self._rows[self._group.index][slice(*item)]

    def sum_in_place(self, item: Range, into: Sequence[Tensor] | None = None) -> float:
        """Write the sum to the rows `into`, by default all; return when all ranks had arrived, by perf_counter."""
        self._barriers[0].arrive()
        together_at = time.perf_counter()
        own = slice_of(*item, self._group.index, self._group.size)
        sum_rows(self._rows, *own, self._rows if into is None else into, self._scratch)
        self._barriers[0].arrive()
        return together_at

    def distribute(self, item: Range) -> None:
        self._barriers[1].arrive()
        if not self._group.is_first:
            self._rows[self._group.index][slice(*item)].copy_(self._rows[0][slice(*item)])
        # The first rank must not begin its next step while another rank still reads from its row.
        self._barriers[1].arrive()


class CopySum:
    """Sums tensors that live outside the shared rows, a chunk at a time."""

    def __init__(self, sharing: HostSharing) -> None:
        self._group = sharing.group
        self._barriers = sharing.barriers
        self._sum_slots, self._distribute_slots = DoubleSlots(sharing, 0), DoubleSlots(sharing, 1)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def sum(self, item: Tensor, for_all: bool) -> Tensor:
        index, size = self._group.index, self._group.size
        for part in _chunks(item) if size > 1 else ():
            rows = self._sum_slots.next(len(part), part.dtype)
            rows[index].copy_(part)
            self._barriers[0].arrive()
            if part.dtype not in self._scratch:
                self._scratch[part.dtype] = _make_scratch(part.dtype)
            sum_rows(rows, *slice_of(0, len(part), index, size), [rows[index]], self._scratch[part.dtype])
            self._barriers[0].arrive()
            if for_all or self._group.is_first:
                for owner, row in enumerate(rows):
                    low, high = slice_of(0, len(row), owner, size)
                    part[low:high].copy_(row[low:high])
        return item

    def distribute(self, item: Tensor) -> None:
        for part in _chunks(item) if self._group.size > 1 else ():
            first = self._distribute_slots.next(len(part), part.dtype)[0]
            if self._group.is_first:
                first.copy_(part)
            self._barriers[1].arrive()
            if not self._group.is_first:
                part.copy_(first)


class DoubleSlots:
    """Two slots in every row, used in turn: while a rank still reads a chunk from one, the next goes into the other.

    No rank writes to the first slot again before all have arrived with the second, and they arrive after reading.
    """

    def __init__(self, sharing: HostSharing, pair: int) -> None:
        self._memory = sharing.memory
        self._pair = pair
        self._turn = 0

    def next(self, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        self._turn ^= 1
        begin = (2 * self._pair + self._turn) * CHUNK_BYTES // dtype.itemsize
        return tuple(row[begin : begin + length] for row in self._memory.rows(dtype))


def row_bytes(hosts: int) -> int:
    """Return the size of a row for `CopySum`: two slots, and two more to distribute sums between hosts."""
    return 2 * CHUNK_BYTES * (1 if hosts == 1 else 2)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split(CHUNK_BYTES // flat.itemsize)
    return parts

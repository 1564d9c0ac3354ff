"""SharedDDP: gradients that live in shared memory from the moment backward makes them, so nothing is copied in or out.

What DDP does with its reducer: gradients are views of a flat buffer, a bucket is summed as soon as backward has filled
it, and only the last micro-batch of a step sends. Every rank sums its slice of all ranks' buckets and writes the result
into each of them, so that clipping and the optimizer find their own copy.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from shoal.sync.shared.choose import Inside
from shoal.sync.shared.layout import Layout, Range
from shoal.sync.shared.meet import Together
from shoal.sync.shared.pipeline import Pipeline
from shoal.sync.shared.slices import scratch_for, slice_of, sum_rows
from shoal.sync.times import CommTimes, covered
from shoal.sync.wires import Bucket, Wire
from shoal.sync.wires.bucket import State, Stateless


class ResidentSum:
    """Sums ranges of the rows in place."""

    def __init__(self, together: Together, rows: tuple[Tensor, ...]) -> None:
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
        self, model: nn.Module, together: Together, layout: Layout, wire: Wire | None, timed: bool = True
    ) -> None:
        self.module = model
        self.inside = Inside("shared")
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
        self._wire: Wire | Stateless = wire or Stateless()
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

"""Gradient exchange: four ways to make every replica's gradient the sum over the world.

    Alone         a world of one: its gradients are the sum
    HookedDDP     DDP's overlap with our hook, which sums in the chosen wire format and times every bucket (variant B)
    StockDDP      DistributedDataParallel with its defaults, to compare with
    BarrierSync   no overlap: backward, barrier, all-reduce, each timed alone (variant A)

The step sees one interface: call `module`, enter `micro_batch(last)` around each forward and backward, multiply the
summed loss by `loss_scale`, and ask `finish` where the communication time went.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and refuses strings.

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.sync.wire import WIRES, Wire
from shoal.sync.world import World, barrier


@dataclass(frozen=True)
class CommTimes:
    """One step's gradient exchange as this rank saw it.

    `ready_at`: when the last gradient was computed and only communication was left (perf_counter).
    `tail_s`: how long backward went on after that. `wait_s`: the part known to be waiting for a peer, where the variant
    can tell by itself. `allreduce_s`: time with at least one all-reduce under way, hidden behind backward or not; None
    where nobody looked.
    """

    ready_at: float
    tail_s: float
    allreduce_s: float | None
    wait_s: float | None = None


class GradientSync(Protocol):
    @property
    def module(self) -> nn.Module: ...
    def loss_scale(self, global_tokens: int) -> float: ...
    def micro_batch(self, last: bool) -> AbstractContextManager[Any]: ...
    def finish(self) -> CommTimes: ...


class Alone:
    """Nobody to agree with. DDP would copy every gradient into its buckets and hold both: 496 MB for GPT-2 124M."""

    def __init__(self, model: nn.Module, timed: bool = True) -> None:
        self.module = model
        self._timed = timed

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> CommTimes:
        return CommTimes(time.perf_counter(), 0.0, 0.0 if self._timed else None)


class _WithDDP:
    """What both DDP variants share: gradients travel only with the last micro-batch of a step."""

    module: DistributedDataParallel

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()


class HookedDDP(_WithDDP):
    def __init__(self, model: nn.Module, world: World, wire: Wire, bucket_mb: float, timed: bool = True) -> None:
        # Replicas were compared before: DDP's own broadcast of every parameter (4 s for 124M at 1 Gbit) is not needed.
        self.module = DistributedDataParallel(
            model,
            process_group=world.group,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._world = world
        self._wire = wire
        self._spans: list[list[float]] = []
        self.module.register_comm_hook(None, self._timed_reduce if timed else self._reduce)

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def finish(self) -> CommTimes:
        now = time.perf_counter()
        spans, self._spans = self._spans, []
        ready_at = spans[-1][0] if spans else now
        return CommTimes(ready_at, now - ready_at, _covered(spans) if spans else None)

    def _reduce(self, _: object, bucket: GradBucket) -> Future[Tensor]:
        return self._wire(self._world, bucket.buffer())

    def _timed_reduce(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        span = [time.perf_counter(), 0.0]
        self._spans.append(span)

        def note_end(done: Future[Tensor]) -> Tensor:
            span[1] = time.perf_counter()
            return done.value()

        return self._reduce(state, bucket).then(note_end)


class StockDDP(_WithDDP):
    """Plain DDP gives no look inside: the all-reduce time is the part that backward visibly waited for."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.module = DistributedDataParallel(model, process_group=world.group)
        self._size = world.size
        self._ready_at = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note_ready)

    def loss_scale(self, global_tokens: int) -> float:
        """DDP divides by the world size; multiply, so that the sum is exact."""
        return self._size / global_tokens

    def finish(self) -> CommTimes:
        tail_s = time.perf_counter() - self._ready_at
        return CommTimes(self._ready_at, tail_s, tail_s)

    def _note_ready(self, _: Tensor) -> None:
        self._ready_at = time.perf_counter()


class BarrierSync:
    def __init__(self, model: nn.Module, world: World, wire: Wire, bucket_mb: float) -> None:
        self.module = model
        self._world = world
        self._wire = wire
        self._bucket_bytes = int(bucket_mb * 2**20)

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> CommTimes:
        ready_at = time.perf_counter()
        barrier(self._world)
        together_at = time.perf_counter()
        for gradients in self._buckets():
            self._sum(gradients)
        now = time.perf_counter()
        return CommTimes(ready_at, now - ready_at, now - together_at, wait_s=together_at - ready_at)

    def _buckets(self) -> list[list[Tensor]]:
        """In the order in which backward made them, as DDP does, so that both variants send the same messages."""
        buckets: list[list[Tensor]] = [[]]
        filled = 0
        for parameter in reversed(list(self.module.parameters())):
            gradient = parameter.grad
            if gradient is None:
                continue
            if filled + gradient.nbytes > self._bucket_bytes and buckets[-1]:
                buckets.append([])
                filled = 0
            buckets[-1].append(gradient)
            filled += gradient.nbytes
        return buckets

    def _sum(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        summed = self._wire(self._world, flat).wait()
        for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def make_gradient_sync(config: SyncConfig, model: nn.Module, world: World) -> GradientSync:
    if config.mode == "stock":
        return StockDDP(model, world)
    wire = WIRES[config.wire]
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in model.parameters()))
    if config.measure == "barrier":
        return BarrierSync(model, world, wire, bucket_mb)
    if world.size == 1 and config.wire == "fp32":
        return Alone(model, timed=config.measure == "hook")
    return HookedDDP(model, world, wire, bucket_mb, timed=config.measure == "hook")


def _covered(spans: list[list[float]]) -> float:
    """Seconds during which at least one bucket was under way."""
    total, reached = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total

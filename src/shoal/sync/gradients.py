"""Gradient exchange: ways to make every replica's gradient the sum over the world, and one to do without.

    HookedDDP     DDP's overlap with our hook, which sums in the chosen wire format and times every bucket (variant B)
    SharedDDP     the same overlap with gradients that live in memory which a machine's ranks share (`sync/shared/`)
    StockDDP      DistributedDataParallel with its defaults, to compare with
    BarrierSync   no overlap: backward, barrier, all-reduce, each timed alone (variant A)
    Alone         no exchange: a world of one, or replicas that take steps of their own and meet in outer steps

The step sees one interface: call `module`, enter `micro_batch(last)` around each forward and backward, multiply the
summed loss by `loss_scale`, and ask `finish` where the communication time went. `close` leaves the model as it was.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and refuses strings.

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.sync.shared.choose import GLOO, Inside
from shoal.sync.shared.copies import SharedWire
from shoal.sync.shared.opening import open_inside
from shoal.sync.shared.resident import SharedDDP
from shoal.sync.tied import HasTiedHead, TiedHead, pays
from shoal.sync.times import CommTimes, covered
from shoal.sync.wires import Bucket, Wire, make_wire
from shoal.sync.wires.bucket import State, Stateless
from shoal.sync.world import World, barrier


class GradientSync(Protocol):
    """`inside` is how ranks of one machine exchange. `extra_bytes` travel beside the gradients, counted as they are.
    `state` is what this rank alone has and a checkpoint must keep, such as what a wire format could not say yet."""

    inside: Inside
    extra_bytes: int

    @property
    def module(self) -> nn.Module: ...
    def loss_scale(self, global_tokens: int) -> float: ...
    def micro_batch(self, last: bool) -> AbstractContextManager[Any]: ...
    def finish(self) -> CommTimes: ...
    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: State) -> None: ...
    def close(self) -> None: ...


class Alone(Stateless):
    """DDP would copy every gradient into its buckets and hold both: 496 MB for GPT-2 124M."""

    inside: Inside = GLOO
    extra_bytes = 0

    def __init__(self, model: nn.Module, own_tokens: int | None = None, allreduce_s: float | None = None) -> None:
        self.module = model
        self._own_tokens = own_tokens
        self._allreduce_s = allreduce_s

    def loss_scale(self, global_tokens: int) -> float:
        """A step on our tokens alone, however many the others have."""
        return 1.0 / (self._own_tokens or global_tokens)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> CommTimes:
        return CommTimes(time.perf_counter(), tail_s=0.0, allreduce_s=self._allreduce_s, wait_s=0.0)

    def close(self) -> None:
        pass


class _WithDDP:
    """What both DDP variants share: gradients travel only with the last micro-batch of a step."""

    module: DistributedDataParallel
    inside: Inside = GLOO
    extra_bytes = 0

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()

    def close(self) -> None:
        """The reducer takes its hooks off the parameters, and frees its buckets, when nobody holds it any more."""
        del self.module


class _WithWire:
    """What a rank has to remember is in its wire format."""

    _wire: Wire

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)


class HookedDDP(_WithDDP, _WithWire):
    def __init__(
        self,
        model: nn.Module,
        world: World,
        wire: Wire,
        bucket_mb: float,
        timed: bool = True,
        tied: TiedHead | None = None,
    ) -> None:
        # Replicas were compared before: DDP's own broadcast of every parameter (4 s for 124M at 1 Gbit) is not needed.
        self.module = DistributedDataParallel(
            model,
            process_group=world.group,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._wire = wire
        self._tied = tied
        self.extra_bytes = 0 if tied is None else tied.extra_bytes
        self._reduce = _Reduce(wire)
        # Not methods of ours: the reducer would hold us and we the reducer, and C++ has no garbage collection.
        self.module.register_comm_hook(self._reduce, _reduce_timed if timed else _reduce)

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if self._tied is not None:
            self._tied.is_last = last
        return super().micro_batch(last)

    def finish(self) -> CommTimes:
        spans, self._reduce.spans = self._reduce.spans, []
        ready_at = spans[-1][0] if spans else time.perf_counter()
        if self._tied is not None:
            self._tied.finish()
            spans = [*self._tied.spans, *spans] if spans else []
            spans.sort()
        now = time.perf_counter()
        return CommTimes(ready_at, now - ready_at, covered(spans) if spans else None)

    def close(self) -> None:
        if self._tied is not None:
            _give_back_head(self.module.module)
        super().close()
        if isinstance(self._wire, SharedWire):
            self._wire.close()


class _Reduce:
    """What DDP's reducer calls: the wire, and when each bucket of this step was under way."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.spans: list[list[float]] = []


def _reduce(state: _Reduce, bucket: GradBucket) -> Future[Tensor]:
    return state.wire(Bucket(bucket.index(), bucket.buffer(), bucket.parameters(), bucket.is_last()))


def _reduce_timed(state: _Reduce, bucket: GradBucket) -> Future[Tensor]:
    span = [time.perf_counter(), 0.0]
    state.spans.append(span)

    def note_end(done: Future[Tensor]) -> Tensor:
        span[1] = time.perf_counter()
        return done.value()

    return _reduce(state, bucket).then(note_end)


class StockDDP(_WithDDP, Stateless):
    """Plain DDP gives no look inside: the all-reduce time is the part that backward visibly waited for."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.module = DistributedDataParallel(model, process_group=world.group)
        self._size = world.size
        self._ready_at = 0.0
        self._hooks = [each.register_post_accumulate_grad_hook(self._note_ready) for each in model.parameters()]

    def loss_scale(self, global_tokens: int) -> float:
        """DDP divides by the world size; multiply, so that the sum is exact."""
        return self._size / global_tokens

    def finish(self) -> CommTimes:
        tail_s = time.perf_counter() - self._ready_at
        return CommTimes(self._ready_at, tail_s, tail_s)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _note_ready(self, _: Tensor) -> None:
        self._ready_at = time.perf_counter()


class BarrierSync(_WithWire):
    inside: Inside = GLOO
    extra_bytes = 0

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
        for index, parameters in enumerate(self._buckets()):
            self._sum(index, parameters)
        now = time.perf_counter()
        return CommTimes(ready_at, now - ready_at, now - together_at, wait_s=together_at - ready_at)

    def close(self) -> None:
        pass

    def _buckets(self) -> list[list[Tensor]]:
        """In the order in which backward made them, as DDP does, so that both variants send the same messages."""
        buckets: list[list[Tensor]] = [[]]
        filled = 0
        for parameter in reversed(list(self.module.parameters())):
            if parameter.grad is None:
                continue
            if filled + parameter.nbytes > self._bucket_bytes and buckets[-1]:
                buckets.append([])
                filled = 0
            buckets[-1].append(parameter)
            filled += parameter.nbytes
        return buckets

    def _sum(self, index: int, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        summed = self._wire(Bucket(index, flat, parameters)).wait()
        for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def make_gradient_sync(config: SyncConfig, model: nn.Module, world: World, tokens: int | None = None) -> GradientSync:
    """`tokens` is how many a rank computes at once; unset, nothing is known of how many rows they touch."""
    if config.mode == "stock":
        return StockDDP(model, world)
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in model.parameters()))
    if world.size == 1 and config.wire == "fp32" and config.measure != "barrier":
        return Alone(model, allreduce_s=0.0 if config.measure == "hook" else None)
    inside, found = open_inside(config, model, world, bucket_mb)
    if isinstance(found, SharedDDP):
        return found
    wire = found or make_wire(config.wire, world, dict(model.named_parameters()))
    sync: HookedDDP | BarrierSync
    if config.measure == "barrier":
        sync = BarrierSync(model, world, wire, bucket_mb)
    else:
        tied = _tied_head(model, tokens, world, wire)
        sync = HookedDDP(model, world, wire, bucket_mb, timed=config.measure == "hook", tied=tied)
    sync.inside = inside
    return sync


def _tied_head(model: nn.Module, tokens: int | None, world: World, wire: Wire) -> TiedHead | None:
    """DDP is told to leave the weight to us: it would wait for the embedding's part of its gradient."""
    if tokens is None or not isinstance(model, HasTiedHead):
        return None
    weight = model.get_parameter(model.tied_name)
    if not pays(weight, tokens, world):
        return None
    tied = TiedHead(weight, tokens, world, wire)
    model.take_head = tied.take
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [model.tied_name])
    return tied


def _give_back_head(model: nn.Module) -> None:
    if isinstance(model, HasTiedHead):
        model.take_head = None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [])

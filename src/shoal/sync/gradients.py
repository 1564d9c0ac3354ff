"""Gradient exchange: ways to make every replica's gradient the sum over the world, and one to do without.

    HookedDDP     DDP's overlap with our hook, which sums in the chosen wire format and times every bucket (variant B)
    SharedDDP     the same overlap with gradients that live in memory which a machine's ranks share (`sync/shared/`)
    StockDDP      DistributedDataParallel with its defaults, to compare with
    BarrierSync   no overlap: backward, barrier, all-reduce, each timed alone (variant A)
    Alone         no exchange: a world of one, or replicas that take steps of their own and meet in outer steps

The step sees one interface: call `module`, enter `micro_batch(last)` around each forward and backward, multiply the
summed loss by `loss_scale`, and ask `finish` where the communication time went. `close` leaves the model as it was.
"""

from __future__ import annotations

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and refuses strings.
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for, touches_few_rows
from shoal.sync.compression import make_wire
from shoal.sync.compression.base import Bucket, Compressor, CompressorState, NoState, State
from shoal.sync.interruptible import GroupInterrupt, await_work
from shoal.sync.shared_memory import open_inside
from shoal.sync.shared_memory.ddp import SharedCompressor, SharedDDP
from shoal.sync.shared_memory.group import GLOO, InsideChoice
from shoal.sync.step_stats import CommTimes, covered
from shoal.sync.world import World, barrier

# SECTION sync/freeable
# A group for whoever waits in C++, out of our reach: DDP's reducer.
#
# It compares the replicas' shapes when it is made, agrees on the order of its buckets at its second step, and without
# a hook it sums the gradients itself. Each of these can wait in a send that gloo ends only at its deadline (see
# `waiting.py`). In a world that can be over, DDP is given this group, whose exchanges end with the generation.


def freeable(world: World) -> dist.ProcessGroup:
    """NCCL's exchanges do not wait on the processor, and end when their group is destroyed."""
    if world.release is None or world.backend != "gloo":
        return world.group
    return _FreeableGroup(world.group, world.release)


class _FreeableGroup(dist.ProcessGroup):
    """What DDP asks of a group, and no more. Whoever hands it to C++ has to keep it as well: C++ has only its half."""

    def __init__(self, group: dist.ProcessGroup, release: GroupInterrupt) -> None:
        # The one that torch's stubs leave out: it alone makes an object whose methods C++ calls.
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._release = release

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Not gloo's: DDP would ask for a gloo of ours to describe in its log."""
        return "freeable"

    def broadcast(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.broadcast(*asked, **more))

    def allreduce(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.allreduce(*asked, **more))

    def allgather(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.allgather(*asked, **more))

    def _guarded(self, work: dist.Work) -> dist.Work:
        return _FreeableWork(work, self._release)


class _FreeableWork(dist.Work):
    def __init__(self, work: dist.Work, release: GroupInterrupt) -> None:
        super().__init__()
        self._work = work
        self._release = release

    def wait(self, timeout: timedelta | None = None) -> bool:
        await_work(self._work, self._release)
        return True

    def get_future(self) -> Future[Any]:
        return self._release.guard(self._work.get_future())


# SECTION sync/tied
# The gradient of a weight that is embedding and head at once, sent in two parts.
#
# Backward finishes such a weight last, because the embedding is the last thing it comes to, although the head's part
# was known first: of GPT-2's gradients that is 31%, and nothing is left to hide it behind. But the embedding's part
# touches only the rows of this batch's tokens. So the head's part travels first of all, behind the whole of backward,
# and at the end every rank sends its few rows to all others, who add them in the order of the ranks: the same bits
# everywhere.


# Before those of DDP, which count from 0.
_INDEX = -1
_ROW_NUMBER_BYTES = 8


@runtime_checkable
class HasTiedHead(Protocol):
    """A model that hands the head's part of `tied`'s gradient to `take_head` as soon as it is known; what comes back
    goes the usual way, and None is taken care of."""

    tied_name: str
    take_head: Callable[[Tensor], Tensor | None] | None


def pays(weight: Tensor, tokens: int, world: World) -> bool:
    """Whether a rank's `tokens` of one micro-batch touch few rows."""
    return world.device.type == "cpu" and touches_few_rows(len(weight), tokens, world.size)


class TiedHead:
    def __init__(self, weight: nn.Parameter, tokens: int, world: World, wire: Compressor) -> None:
        self._weight = weight
        self._world = world
        self._wire = wire
        self._arriving: Future[Tensor] | None = None
        self.is_last = True
        self.spans: list[list[float]] = []
        self._tokens = tokens
        self._rows = torch.empty(world.size * tokens, dtype=torch.int64)
        self._parts = torch.empty(world.size * tokens, weight.shape[1], dtype=weight.dtype)

    @property
    def extra_bytes(self) -> int:
        """What the rows add to the bytes of a rank's gradients, of which it sends 2(N-1)/N."""
        one = self._tokens * (_ROW_NUMBER_BYTES + self._weight.shape[1] * self._weight.itemsize)
        return one * self._world.size // 2

    def take(self, dense: Tensor) -> Tensor | None:
        """Called from backward, at its beginning. What earlier micro-batches left goes with it."""
        if not self.is_last:
            return dense
        if self._weight.grad is not None:
            dense.add_(self._weight.grad)
            self._weight.grad = None
        span = [time.perf_counter(), 0.0]
        self.spans = [span]

        def note_end(done: Future[Tensor]) -> Tensor:
            span[1] = time.perf_counter()
            return done.value().view_as(dense)

        self._arriving = self._wire(Bucket(_INDEX, dense.view(-1), [self._weight], is_last=False)).then(note_end)
        return None

    def finish(self) -> None:
        """The rows, once backward is through; afterwards the weight's gradient is the sum over the world."""
        if self._arriving is None:
            return
        rest = self._weight.grad
        assert rest is not None  # noqa: S101 - the embedding was used
        assert rest.is_sparse  # noqa: S101 - alone it has rows only
        began = time.perf_counter()
        self._exchange(rest._indices()[0], rest._values())
        self.spans.append([began, time.perf_counter()])
        summed, self._arriving = self._arriving.wait(), None
        summed.index_add_(0, self._rows, self._parts)
        self._weight.grad = summed

    def _exchange(self, rows: Tensor, parts: Tensor) -> None:
        # By the group itself: the public function of this name changed between the versions of torch that we allow.
        group = self._world.group
        both = [group._allgather_base(self._rows, rows), group._allgather_base(self._parts, parts)]
        for work in both:
            await_work(work, self._world.release)


def take_over(model: nn.Module, tokens: int | None, world: World, wire: Compressor) -> TiedHead | None:
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


def give_back(model: nn.Module) -> None:
    if isinstance(model, HasTiedHead):
        model.take_head = None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [])


# SECTION sync/ddp
# Gradients through DDP: inside its overlap, by our hook or by its own means.


class _WithDDP:
    """What both DDP variants share: gradients travel only with the last micro-batch of a step."""

    module: DistributedDataParallel
    inside: InsideChoice = GLOO
    extra_bytes = 0

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()

    def close(self) -> None:
        """The reducer takes its hooks off the parameters, and frees its buckets, when nobody holds it any more."""
        del self.module


class HookedDDP(_WithDDP, CompressorState):
    def __init__(
        self,
        model: nn.Module,
        world: World,
        wire: Compressor,
        bucket_mb: float,
        timed: bool = True,
        tied: TiedHead | None = None,
    ) -> None:
        # Replicas were compared before: DDP's own broadcast of every parameter (4 s for 124M at 1 Gbit) is not needed.
        self.module = DistributedDataParallel(
            model,
            process_group=freeable(world),
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
            give_back(self.module.module)
        super().close()
        if isinstance(self._wire, SharedCompressor):
            self._wire.close()


class _Reduce:
    """What DDP's reducer calls: the wire, and when each bucket of this step was under way."""

    def __init__(self, wire: Compressor) -> None:
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


# DDP compares the annotations of a hook with these classes, and finds strings where annotations are postponed.
for _hook in (_reduce, _reduce_timed):
    _hook.__annotations__.update({"bucket": GradBucket, "return": Future[Tensor]})


class StockDDP(_WithDDP, NoState):
    """Plain DDP, timed from outside: how long backward waited for it, but not how long its all-reduces took.

    Only a communication hook sees those, and a hook replaces the C++ path that makes this DDP the stock one.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.module = DistributedDataParallel(model, process_group=freeable(world))
        self._size = world.size
        self._ready_at = 0.0
        self._hooks = [each.register_post_accumulate_grad_hook(self._note_ready) for each in model.parameters()]

    def loss_scale(self, global_tokens: int) -> float:
        """DDP divides by the world size; multiply, so that the sum is exact."""
        return self._size / global_tokens

    def finish(self) -> CommTimes:
        tail_s = time.perf_counter() - self._ready_at
        return CommTimes(self._ready_at, tail_s, allreduce_s=None)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _note_ready(self, _: Tensor) -> None:
        self._ready_at = time.perf_counter()


# SECTION sync/barriers
# Gradients without overlap: backward, barrier, all-reduce, each timed alone. Slower, and clear.


class BarrierSync(CompressorState):
    inside: InsideChoice = GLOO
    extra_bytes = 0

    def __init__(self, model: nn.Module, world: World, wire: Compressor, bucket_mb: float) -> None:
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


class GradientSync(Protocol):
    """`inside` is how ranks of one machine exchange. `extra_bytes` travel beside the gradients, counted as they are.
    `state` is what this rank alone has and a checkpoint must keep, such as what a wire format could not say yet."""

    inside: InsideChoice
    extra_bytes: int

    @property
    def module(self) -> nn.Module: ...
    def loss_scale(self, global_tokens: int) -> float: ...
    def micro_batch(self, last: bool) -> AbstractContextManager[Any]: ...
    def finish(self) -> CommTimes: ...
    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: State) -> None: ...
    def close(self) -> None: ...


class NoExchange(NoState):
    """DDP would copy every gradient into its buckets and hold both: 496 MB for GPT-2 124M."""

    inside: InsideChoice = GLOO
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


def make_gradient_sync(config: SyncConfig, model: nn.Module, world: World, tokens: int | None = None) -> GradientSync:
    """`tokens` is how many a rank computes at once; unset, nothing is known of how many rows they touch."""
    if config.mode == "stock":
        return StockDDP(model, world)
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in model.parameters()))
    if world.size == 1 and config.wire == "fp32" and config.measure != "barrier":
        return NoExchange(model, allreduce_s=0.0 if config.measure == "hook" else None)
    inside, found = open_inside(config, model, world, bucket_mb)
    if isinstance(found, SharedDDP):
        return found
    wire = found or make_wire(config.wire, world, dict(model.named_parameters()))
    sync: HookedDDP | BarrierSync
    if config.measure == "barrier":
        sync = BarrierSync(model, world, wire, bucket_mb)
    else:
        tied = take_over(model, tokens, world, wire)
        sync = HookedDDP(model, world, wire, bucket_mb, timed=config.measure == "hook", tied=tied)
    sync.inside = inside
    return sync


# SECTION train/clip
# Clipping by the norm of all gradients together.


# What torch adds to a norm before it divides by it.
_GUARD = 1e-6


def clip(parameters: Iterable[Tensor], most: float) -> float:
    """The norm before clipping; the same bits as `clip_grad_norm_`.

    That one multiplies gradients which are small enough by one: 1 GB read and written for GPT-2 124M.
    """
    having = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([each.grad for each in having if each.grad is not None])
    norm = float(total)
    if not norm + _GUARD < most:
        torch.nn.utils.clip_grads_with_norm_(having, most, total)
    return norm

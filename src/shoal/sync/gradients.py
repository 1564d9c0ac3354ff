"""Gradient exchange: make every replica's gradient the sum over all ranks.

    HookedDDP     DDP's overlap with a communication hook that compresses and times every bucket
    SharedDDP     the same overlap, with gradients in memory that the ranks of one machine share (`shared_memory/`)
    StockDDP      DistributedDataParallel with its defaults, for comparison
    AfterBackward no overlap: steps of several updates or with unused parameters, and `--measure barrier`
    NoExchange    no exchange: a single rank, or replicas that take inner steps and meet in outer steps

A training step uses one interface, `GradientSync`: multiply the summed loss of each micro-batch by `loss_scale`, pass
it to `backward`, and ask `finish` for the communication times. The model is called as it is: DDP's reducer needs
nothing of the forward pass, so a user's loop needs no wrapper.
"""

# No `from __future__ import annotations` here: DDP inspects the annotations of the hook and refuses strings.
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for, touches_few_rows
from shoal.errors import UsageError
from shoal.sync.communication import communication
from shoal.sync.compression import make_compressor, stage
from shoal.sync.compression.base import Bucket, Compressor, CompressorState, NoState, State
from shoal.sync.compression.staging import StagedCompressor
from shoal.sync.interruptible import GroupInterrupt, await_future, await_work
from shoal.sync.shared_memory import open_shared_memory
from shoal.sync.shared_memory.ddp import SharedCompressor, SharedDDP
from shoal.sync.shared_memory.group import GLOO, InsideChoice
from shoal.sync.step_stats import CommTimes, Mark, covered, mark, max_over_world, to_host_times
from shoal.sync.world import World, barrier


class GradientSync(Protocol):
    inside: InsideChoice  # how the ranks of one machine exchange gradients
    can_leave_out: bool  # a step may exchange the gradients of some parameters only
    extra_bytes: int  # sent beside the gradients, in the same unit

    module: nn.Module  # the model itself

    def loss_scale(self, global_count: int) -> float: ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch; with the last one of a step they are exchanged."""

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        """Wait for the exchange. `only` some parameters: where gradients are exchanged after backward."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's own state, which a checkpoint must keep: the residuals of a compressor."""

    def load_state(self, state: State) -> None: ...

    def resize(self, tokens: int) -> None:
        """Prepare for last micro-batches of at most `tokens` tokens, between two steps."""

    def close(self) -> None:
        """Leave the model as it was before."""


def make_gradient_sync(
    config: SyncConfig, model: nn.Module, world: World, tokens: int | None = None, after_backward: bool = False
) -> GradientSync:
    """Return the gradient exchange for the configuration.

    `tokens` is how many tokens a rank computes at once. Without it a tied weight is sent as a whole, since it is not
    known how many rows its tokens touch. `after_backward` is for steps that may leave parameters out.
    """
    if config.mode == "stock" and not after_backward:
        return StockDDP(model, world)
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in model.parameters()))
    if world.size == 1 and config.wire == "fp32" and config.measure != "barrier":
        return NoExchange(model, allreduce_s=0.0 if config.measure == "hook" else None)
    inside, shared = open_shared_memory(config, model, world, bucket_mb, in_place=not after_backward)
    if isinstance(shared, SharedDDP):
        return shared
    if shared is not None:
        compressor = stage(shared, world)
    else:
        compressor = make_compressor(config.wire, world, dict(model.named_parameters()))
    sync: HookedDDP | AfterBackward
    if after_backward or config.measure == "barrier":
        sync = AfterBackward(model, world, compressor, bucket_mb, has_barrier=config.measure == "barrier")
    else:
        tied = split_tied_weight(model, tokens, world, compressor)
        sync = HookedDDP(model, world, compressor, bucket_mb, timed=config.measure == "hook", tied=tied)
    sync.inside = inside
    return sync


class SyncDefaults:
    inside: InsideChoice = GLOO
    can_leave_out = False
    extra_bytes = 0

    def loss_scale(self, global_count: int) -> float:
        return 1.0 / global_count

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def resize(self, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


class _DDPSync(SyncDefaults):
    """The common part of both DDP variants: gradients travel only with the last micro-batch of a step.

    Only the reducer of DDP is used. `DistributedDataParallel.forward` would prepare it for every backward; here
    `backward` does, for the last one only. In all others the reducer ignores the gradients, which add up.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.module = ddp.module
        self._ddp = ddp

    def backward(self, loss: Tensor, last: bool) -> None:
        with communication():
            if last:
                reducer = self._ddp.reducer
                # DDP communicates here, once: ranks agree on the order of buckets that the first backward has shown.
                reducer._rebuild_buckets()
                reducer.prepare_for_forward()
                reducer.prepare_for_backward([])
            loss.backward()

    def close(self) -> None:
        """Drop the reducer: it removes its hooks and frees its buckets with its last reference."""
        del self._ddp


class UnusedParameters(UsageError):
    """Backward reached not all parameters, so some gradients were not exchanged."""


def check_gradients(model: nn.Module, only: Collection[Tensor] | None = None) -> None:
    """Raise `UnusedParameters` if a trained parameter has no gradient after the backward passes of a step."""
    chosen = None if only is None else set(map(id, only))
    if any(p.requires_grad and p.grad is None and (chosen is None or id(p) in chosen) for p in model.parameters()):
        raise _unused_parameters(model, chosen)


def _unused_parameters(model: nn.Module, chosen: Collection[int] | None = None) -> UnusedParameters:
    unused = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is None and (chosen is None or id(p) in chosen)
    ]
    named = f" of {', '.join(unused[:3])}{' …' if len(unused) > 3 else ''}" if unused else " of some parameters"
    return UnusedParameters(
        f"backward made no gradient{named}",
        why="all ranks exchange the gradients of all parameters, and would wait for these",
        fix="use every parameter in the loss, or freeze those that are not trained: parameter.requires_grad_(False); "
        "if only some steps leave parameters out: shoal.Session(..., unused_parameters=True)",
    )


class HookedDDP(_DDPSync, CompressorState):
    def __init__(
        self,
        model: nn.Module,
        world: World,
        compressor: Compressor,
        bucket_mb: float,
        timed: bool = True,
        tied: "TiedHead | None" = None,
    ) -> None:
        # The replicas were compared before, so DDP's own broadcast of all parameters (4 s for 124M at 1 Gbit) is not
        # needed.
        with communication():
            ddp = DistributedDataParallel(
                model,
                process_group=interruptible_group(world),
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        super().__init__(ddp)
        self._compressor = compressor
        self._tied = tied
        self.extra_bytes = 0 if tied is None else tied.extra_bytes
        self._hook_state = _HookState(compressor)
        # Not bound methods: the reducer and this object would refer to each other, and C++ has no garbage collection.
        ddp.register_comm_hook(self._hook_state, _timed_hook if timed else _hook)

    def backward(self, loss: Tensor, last: bool) -> None:
        if self._tied is not None:
            self._tied.is_last = last
        self._hook_state.is_complete = False
        super().backward(loss, last)

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        if not self._hook_state.is_complete:
            raise _unused_parameters(self.module)
        spans, self._hook_state.spans = to_host_times(self._hook_state.spans), []
        ready_at = spans[-1][0] if spans else time.perf_counter()
        if self._tied is not None:
            self._tied.finish()
            spans = sorted([*self._tied.spans, *spans]) if spans else []
        now = time.perf_counter()
        return CommTimes(ready_at, now - ready_at, covered(spans) if spans else None)

    def resize(self, tokens: int) -> None:
        if self._tied is not None:
            self._tied.resize(tokens)
            self.extra_bytes = self._tied.extra_bytes

    def close(self) -> None:
        if self._tied is not None:
            if isinstance(self.module, HasTiedHead):
                self.module.take_head = None
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.module, [])
        super().close()
        if isinstance(self._compressor, SharedCompressor | StagedCompressor):
            self._compressor.close()


class _HookState:
    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        # Begin and end of each bucket of this step.
        self.spans: list[list[Mark]] = []
        self.is_complete = False  # the last bucket of this step was handed over


def _hook(state: _HookState, bucket: GradBucket) -> Future[Tensor]:
    state.is_complete = bucket.is_last()
    return state.compressor(Bucket(bucket.index(), bucket.buffer(), bucket.parameters(), bucket.is_last()))


def _timed_hook(state: _HookState, bucket: GradBucket) -> Future[Tensor]:
    device = bucket.buffer().device
    span = [mark(device), 0.0]
    state.spans.append(span)

    def note_end(done: Future[Tensor]) -> Tensor:
        # A GPU's callback runs on a stream that waits for the exchange.
        span[1] = mark(device)
        return done.value()

    return _hook(state, bucket).then(note_end)


class StockDDP(_DDPSync, NoState):
    """Plain DDP, timed from outside: how long backward waited for it, but not how long its all-reduces took.

    Only a communication hook could time those, and a hook replaces the C++ path of stock DDP.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        with communication():
            super().__init__(DistributedDataParallel(model, process_group=interruptible_group(world)))
        self._size = world.size
        self._ready_at = 0.0
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ready = 0
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note_ready) for parameter in self._trained]

    def loss_scale(self, global_count: int) -> float:
        """Return a scale that undoes DDP's division by the world size, so that the gradient is the exact sum."""
        return self._size / global_count

    def backward(self, loss: Tensor, last: bool) -> None:
        self._ready = 0
        super().backward(loss, last)

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        if self._ready < len(self._trained):
            raise _unused_parameters(self.module)
        tail_s = time.perf_counter() - self._ready_at
        return CommTimes(self._ready_at, tail_s, allreduce_s=None)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _note_ready(self, _: Tensor) -> None:
        self._ready += 1
        self._ready_at = time.perf_counter()


class AfterBackward(SyncDefaults, CompressorState):
    """Exchanges gradients when backward has ended, of all parameters or of some: of those with one on any rank.

    For steps with several updates or with parameters that a loss leaves out, where DDP's reducer would wait for
    gradients that never come; and with a barrier for `--measure barrier`: backward, barrier, all-reduce, each timed
    alone. Slower where backward could hide the exchange.
    """

    can_leave_out = True

    def __init__(
        self, model: nn.Module, world: World, compressor: Compressor, bucket_mb: float, has_barrier: bool = False
    ) -> None:
        self.module = model
        self._world = world
        self._compressor: Compressor = compressor
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._has_barrier = has_barrier
        self._ready_at = 0.0  # the end of the last backward, by perf_counter

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss, last)
        self._ready_at = time.perf_counter()

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        arrived_at = time.perf_counter()
        used = self._with_gradient(only)
        if self._has_barrier:
            barrier(self._world)
        together_at = time.perf_counter()
        for index, parameters in enumerate(self._buckets(used)):
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            summed = await_future(self._compressor(Bucket(index, flat, parameters)))
            for parameter, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
                # A compressor may sum into memory that it uses again.
                is_own = summed.data_ptr() == flat.data_ptr()
                parameter.grad = part.view_as(parameter) if is_own else part.view_as(parameter).clone()
        now = time.perf_counter()
        # The tail begins with the last gradient, as in DDP; the engine takes out what the program did since.
        wait_s = together_at - arrived_at if self._has_barrier else None
        return CommTimes(self._ready_at, now - self._ready_at, now - together_at, wait_s)

    def close(self) -> None:
        if isinstance(self._compressor, SharedCompressor | StagedCompressor):
            self._compressor.close()

    def _with_gradient(self, only: Collection[Tensor] | None) -> list[nn.Parameter]:
        """Return the parameters with a gradient on any rank; a rank without one gets zeros.

        They are in the order of backward, as in DDP, so that both send the same messages. One without a gradient on
        all ranks keeps None: its optimizer leaves it as it is, as in one process.
        """
        chosen = None if only is None else set(map(id, only))
        parameters = [
            parameter
            for parameter in reversed(list(self.module.parameters()))
            if parameter.requires_grad and (chosen is None or id(parameter) in chosen)
        ]
        counts = max_over_world(self._world, [float(parameter.grad is not None) for parameter in parameters])
        used = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        bucket: list[nn.Parameter] = []
        for parameter in parameters:
            filled_bytes = sum(other.nbytes for other in bucket)
            if bucket and (filled_bytes + parameter.nbytes > self._bucket_bytes or parameter.dtype != bucket[0].dtype):
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket


class NoExchange(SyncDefaults, NoState):
    """No gradient exchange. DDP would copy every gradient into its buckets and hold both: 496 MB for GPT-2 124M."""

    can_leave_out = True

    def __init__(self, model: nn.Module, allreduce_s: float | None = None) -> None:
        self.module = model
        self._allreduce_s = allreduce_s

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        return CommTimes(time.perf_counter(), tail_s=0.0, allreduce_s=self._allreduce_s, wait_s=0.0)


# A weight that is both embedding and head. Backward finishes its gradient last, because it reaches the embedding last,
# although the head's part was known first: that is 31% of GPT-2's gradients, with nothing left to overlap with. But the
# embedding's part touches only the rows of this batch's tokens. So the head's part travels first, hidden behind all of
# backward. At the end every rank sends its few rows to all others, which add them in the order of the ranks: the same
# bits everywhere.

# The bucket index of the head's part, before DDP's buckets, which count from 0.
_HEAD_INDEX = -1
_ROW_NUMBER_BYTES = 8


@runtime_checkable
class HasTiedHead(Protocol):
    """A model that passes the head's part of the gradient of its tied weight to `take_head` as soon as it is known.

    Backward continues with the returned tensor; None means that the part has been taken over.
    """

    tied_name: str
    rows_per_sample: int  # rows of the embedding that a sample touches at most
    take_head: Callable[[Tensor], Tensor | None] | None


def is_worth_splitting(weight: Tensor, tokens: int, world: World) -> bool:
    """Return whether a rank's `tokens` of one micro-batch touch few rows of the weight. All ranks decide alike."""
    return world.device.type == "cpu" and not world.has_gpus and touches_few_rows(len(weight), tokens, world.size)


def split_tied_weight(model: nn.Module, tokens: int | None, world: World, compressor: Compressor) -> "TiedHead | None":
    """Take the tied weight out of DDP, which would wait for the embedding's part of its gradient."""
    if tokens is None or not isinstance(model, HasTiedHead):
        return None
    weight = model.get_parameter(model.tied_name)
    if not is_worth_splitting(weight, tokens, world):
        return None
    tied = TiedHead(weight, tokens, world, compressor)
    model.take_head = tied.take
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [model.tied_name])
    return tied


class TiedHead:
    """Exchanges the gradient of a tied weight: the head's part during backward, the embedding's rows at the end."""

    def __init__(self, weight: nn.Parameter, tokens: int, world: World, compressor: Compressor) -> None:
        self._weight = weight
        self._world = world
        self._compressor = compressor
        self._pending: Future[Tensor] | None = None
        self.is_last = True
        self.spans: list[list[float]] = []
        self.resize(tokens)

    def resize(self, tokens: int) -> None:
        """Make room for the rows of at most `tokens` tokens of every rank."""
        self._tokens = tokens
        self._rows = torch.empty(self._world.size * tokens, dtype=torch.int64)
        self._row_gradients = torch.empty(self._world.size * tokens, self._weight.shape[1], dtype=self._weight.dtype)

    @property
    def extra_bytes(self) -> int:
        """What the rows add to the bytes of a rank's gradients, of which it sends 2(N-1)/N."""
        own_bytes = self._tokens * (_ROW_NUMBER_BYTES + self._weight.shape[1] * self._weight.itemsize)
        return own_bytes * self._world.size // 2

    def take(self, dense: Tensor) -> Tensor | None:
        """Send the head's part, at the beginning of backward, with the gradients of earlier micro-batches."""
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

        bucket = Bucket(_HEAD_INDEX, dense.view(-1), [self._weight], is_last=False)
        self._pending = self._compressor(bucket).then(note_end)
        return None

    def finish(self) -> None:
        """Exchange the rows after backward; afterwards the weight's gradient is the sum over all ranks."""
        if self._pending is None:
            return
        embedding = self._weight.grad
        assert embedding is not None  # noqa: S101 - the embedding was used
        assert embedding.is_sparse  # noqa: S101 - without the head's part it has rows only
        began = time.perf_counter()
        # By the group itself: the public function of this name changed between the supported versions of torch.
        group = self._world.group
        indices, values = embedding._indices()[0], embedding._values()
        if missing := self._tokens - len(indices):
            # This rank's micro-batch is smaller than another's: row 0 gets nothing several times.
            indices, values = F.pad(indices, (0, missing)), F.pad(values, (0, 0, 0, missing))
        rows = group._allgather_base(self._rows, indices)
        gradients = group._allgather_base(self._row_gradients, values)
        for work in (rows, gradients):
            await_work(work, self._world.release)
        self.spans.append([began, time.perf_counter()])
        summed, self._pending = await_future(self._pending), None
        summed.index_add_(0, self._rows, self._row_gradients)
        self._weight.grad = summed


# DDP's reducer waits in C++: it compares the replicas' shapes when it is made, agrees on the order of its buckets in
# its second step, and sums the gradients itself without a hook. Each can wait in a send that gloo ends only at its
# timeout (see `interruptible.py`). In a world whose membership can change, DDP gets a group whose waits end with the
# generation.


def interruptible_group(world: World) -> dist.ProcessGroup:
    """Return the group for DDP's own collectives. Those of NCCL do not block the processor, and end with the group."""
    if world.gpu_group is not None:
        return world.gpu_group
    if world.release is None or world.backend != "gloo":
        return world.group
    return _InterruptibleGroup(world.group, world.release)


class _InterruptibleGroup(dist.ProcessGroup):
    """The collectives that DDP uses. The owner must keep a Python reference: C++ holds only the C++ half."""

    def __init__(self, group: dist.ProcessGroup, release: GroupInterrupt) -> None:
        # torch's stubs omit this constructor, the only one whose object has methods that C++ calls.
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._release = release

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Return a name other than gloo: DDP would ask for the gloo backend to describe it in its log."""
        return "interruptible"

    def broadcast(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _InterruptibleWork(self._group.broadcast(*args, **kwargs), self._release)

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _InterruptibleWork(self._group.allreduce(*args, **kwargs), self._release)

    def allgather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _InterruptibleWork(self._group.allgather(*args, **kwargs), self._release)


class _InterruptibleWork(dist.Work):
    def __init__(self, work: dist.Work, release: GroupInterrupt) -> None:
        super().__init__()
        self._work = work
        self._release = release

    def wait(self, timeout: timedelta | None = None) -> bool:
        await_work(self._work, self._release)
        return True

    def get_future(self) -> Future[Any]:
        return self._release.guard(self._work.get_future())

"""Gradients through DDP: inside its overlap, by our hook or by its own means."""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and refuses strings.

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.sync.freeable import freeable
from shoal.sync.shared.choose import GLOO, Inside
from shoal.sync.shared.copies import SharedWire
from shoal.sync.tied import TiedHead, give_back
from shoal.sync.times import CommTimes, covered
from shoal.sync.wires import Bucket, Wire
from shoal.sync.wires.bucket import Stateless, WithWire
from shoal.sync.world import World


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


class HookedDDP(_WithDDP, WithWire):
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

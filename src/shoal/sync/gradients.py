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

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.sync.barriers import BarrierSync
from shoal.sync.ddp import HookedDDP, StockDDP
from shoal.sync.shared.choose import GLOO, Inside
from shoal.sync.shared.opening import open_inside
from shoal.sync.shared.resident import SharedDDP
from shoal.sync.tied import take_over
from shoal.sync.times import CommTimes
from shoal.sync.wires import make_wire
from shoal.sync.wires.bucket import State, Stateless
from shoal.sync.world import World


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
        tied = take_over(model, tokens, world, wire)
        sync = HookedDDP(model, world, wire, bucket_mb, timed=config.measure == "hook", tied=tied)
    sync.inside = inside
    return sync

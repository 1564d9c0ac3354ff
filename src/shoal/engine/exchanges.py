"""A replica's exchanges with the other ranks: gradients, parameters of outer steps, statistics, counts and buffers.

Compression, shares of the batch and outer steps are objects behind interfaces (`sync.gradients`, `sync.outer`), and a
world of one rank has exchanges too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema import EngineConfig, SyncConfig
from shoal.cost.batch_plan import BatchPlan
from shoal.cost.model_size import grad_bytes
from shoal.engine.sharding import make_sharded_exchanges
from shoal.engine.training_state import TrainingState
from shoal.sync.compression import kernel_or_plain
from shoal.sync.gradients import GradientSync, HasTiedHead, NoExchange, make_gradient_sync
from shoal.sync.interruptible import await_work
from shoal.sync.outer import EveryStep, OuterSync, make_outer_sync
from shoal.sync.sharded.sync import ShardedSync
from shoal.sync.step_stats import StepGather
from shoal.sync.world import World, set_collective_timeout, without_group

# A float has 24 bits: a count is sent as two digits of this base, which stay exact when they are summed over ranks.
_BASE = 1 << 16


class StepTotals:
    """What a step sums over all ranks beside the gradients: how many terms its loss has, and the model's buffers.

    Samples may count differently: a batch of texts has as many terms as it has tokens that are not padding. The
    gradient is exact when the sum of all losses is divided by the number of all terms, which only the sum over the
    ranks gives.

    Buffers, such as the running means of BatchNorm, are updated by every forward pass on this rank's samples alone. All
    ranks take the average, weighted by their parts of the batch, so that replicas stay equal to the bit. DDP takes
    those of rank 0 instead, which forgets what the other ranks have seen.

    Both travel in one small all-reduce that starts before the last backward of a step, which hides it. A world of one
    rank exchanges nothing.
    """

    def __init__(self, world: World, buffers: Mapping[str, Tensor], weight: float) -> None:
        self._world = world
        self.weight = weight  # This rank's part of the global batch.
        self._buffers = list(buffers.values())
        self._before: list[Tensor] = []
        self.common = [buffer.clone() for buffer in self._buffers]  # When all ranks last had the same.
        self._count = 0
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the buffers as they are before the step."""
        self._before = [buffer.clone() for buffer in self._buffers]
        self._flat = self._work = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back: the step is repeated."""
        for buffer, before in zip(self._buffers, self._before, strict=False):
            buffer.copy_(before)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the buffers as they are for those that all ranks have in common."""
        self.common = [buffer.clone() for buffer in self._buffers]

    def average_buffers(self) -> None:
        """Make the buffers of all ranks equal, after an exchange of parameters."""
        if self._buffers:
            self.start(0)
            self.finish()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Return to the buffers that all ranks last had in common."""
        for buffer, common in zip(self._buffers, self.common, strict=True):
            buffer.copy_(common)

    @torch.no_grad()
    def start(self, count: int) -> None:
        """Send this rank's part, after the last forward of a step."""
        self._count = count
        if self._world.size == 1:
            return
        device = self._world.control_device
        parts = [torch.tensor([count // _BASE, count % _BASE], dtype=torch.float32, device=device)]
        parts += [(buffer.flatten().float() * self.weight).to(device) for buffer in self._buffers]
        self._flat = torch.cat(parts)
        self._work = dist.all_reduce(self._flat, group=self._world.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> int:
        """Write the averages into the buffers; return the number of terms of all ranks."""
        if self._flat is None or self._work is None:
            if self._world.size == 1:
                self.adopt()
            # Otherwise nothing was started: replicas train alone, and what they have in common stays.
            return self._count
        await_work(self._work, self._world.release)
        (high, low), averages = self._flat[:2].tolist(), self._flat[2:]
        for buffer, part in zip(self._buffers, averages.split([b.numel() for b in self._buffers]), strict=True):
            average = part.view_as(buffer)
            buffer.copy_(average if buffer.is_floating_point() else average.round())
        self.adopt()
        self._flat = self._work = None
        return int(high) * _BASE + int(low)


@dataclass(frozen=True)
class Exchanges:
    """A replica's exchanges in one world, with one division of the batch."""

    sync: GradientSync  # Sums gradients in every step.
    outer: OuterSync  # Averages parameters at the end of a round of local steps.
    steps: StepGather  # Gathers the loss and the statistics of every step.
    totals: StepTotals  # Sums counts and buffers in every step.

    def change_plan(self, model: nn.Module, plan: BatchPlan, weight: float) -> None:
        """Continue with another division of the batch, of which this rank has the part `weight`."""
        self.sync.resize(_tied_rows(model, plan) or 0)
        self.totals.weight = weight
        if isinstance(self.sync, ShardedSync):
            self.sync.rounds = max(plan.counts)
        self.outer.set_weight(weight)


def make_exchanges(config: EngineConfig, state: TrainingState, world: World, plan: BatchPlan) -> Exchanges:
    model, share = state.model, plan.shares[world.rank]
    weight = share / plan.global_batch
    outer = make_outer_sync(config.sync, model, world, weight)
    sync: GradientSync
    if config.sync.is_sharded:
        sync, outer = make_sharded_exchanges(
            config.sync, state, world, max(plan.counts), config.train.unused_parameters
        )
    elif config.sync.is_outer:
        sync = NoExchange(model)
    else:
        sync = make_gradient_sync(
            config.sync, model, world, tokens=_tied_rows(model, plan), after_backward=config.train.unused_parameters
        )
    set_collective_timeout(world, exchange_timeout_s(config.sync, outer))
    return Exchanges(sync, outer, StepGather(world, outer.lag_steps), StepTotals(world, state.buffers(), weight))


def no_exchanges(model: nn.Module, world: World, steps: StepGather | None = None) -> Exchanges:
    """Return the exchanges of a replica that has no process group."""
    totals = StepTotals(without_group(world), {}, 1.0)
    return Exchanges(NoExchange(model), EveryStep(), steps or StepGather(world), totals)


def exchange_timeout_s(sync: SyncConfig, outer: OuterSync) -> float:
    """Return how long a rank waits for a peer: a rank that may run ahead waits for as many steps of the slowest."""
    return sync.timeout_s * (1 + outer.lag_steps)


def _tied_rows(model: nn.Module, plan: BatchPlan) -> int | None:
    """Return the rows of a tied embedding that a rank's last micro-batch touches at most."""
    if not isinstance(model, HasTiedHead):
        return None
    return model.rows_per_sample * max(plan.sizes(rank)[-1] for rank in range(len(plan.shares)))


def describe_exchanges(sync: SyncConfig, exchanges: Exchanges, state: TrainingState) -> dict[str, object]:
    """Return the fields of `start` and `choice` events about the exchanges. `sync` are the settings in use."""
    gradients = exchanges.sync
    return {
        "sync": sync.mode,
        "wire": sync.wire,
        "grad_bytes": grad_bytes(shapes_of(state), sync.wire) + gradients.extra_bytes,
        "round_steps": exchanges.outer.round_steps,
        "wire_made_by": kernel_or_plain(sync.wire),
        "inside": gradients.inside.way,
        "inside_note": gradients.inside.note,
    }


def shapes_of(state: TrainingState) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all parameters that are trained."""
    return tuple(tuple(parameter.shape) for parameter in state.parameters().values())

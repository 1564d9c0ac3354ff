"""One replica and its training step: backward of micro-batches, exchange, clip, update, record.

The engine knows a model, optimizers and a number of samples. What a sample is, and how a loss is made of it, is known
to the program that drives the engine: `engine.session` for a user's loop, and by it shoal's own GPT.

Compression, batch shares and outer steps are objects behind interfaces, and a world of one rank is no exception. Other
modules read an engine's fields; its methods change them.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.config.schema import EngineConfig, SyncConfig
from shoal.cost.batch_plan import BatchPlan, redivide_batch, weights_of
from shoal.cost.model_size import grad_bytes
from shoal.engine.balance import (
    Balance,
    Division,
    RankTime,
    describe_change,
    describe_left_out,
    useless_warning,
)
from shoal.engine.checkpoint import Progress, Shares
from shoal.engine.recorder import Recorder
from shoal.engine.refusal import StepResult, explain_refusal
from shoal.engine.stragglers import Stragglers
from shoal.engine.totals import StepTotals
from shoal.engine.training_state import StateTree, TrainingState
from shoal.engine.update import StepNumbers, can_decide_on_gpu, clip_gradients, gradient_norm, update_if_finite
from shoal.errors import ShoalError, UsageError
from shoal.host.node_stats import NodeStats, NodeWatch
from shoal.sync.compression import kernel_or_plain
from shoal.sync.fence import Fence, OpenFence, StepBoundary
from shoal.sync.gradients import (
    GradientSync,
    HasTiedHead,
    NoExchange,
    check_gradients,
    make_gradient_sync,
)
from shoal.sync.outer import EveryStep, NonFiniteExchange, OuterSync, make_outer_sync
from shoal.sync.replicas import gather_integers
from shoal.sync.step_stats import CommTimes, OwnTimes, StepGather, StepStats, StepTimer
from shoal.sync.world import World, set_collective_timeout, without_group

# Seeds of neighbouring ranks and steps differ by far more than a step draws.
_SEED_STRIDE = 1_000_003


class StopRequest:
    """Whether this rank was asked to stop; the ranks agree on the step after which all of them do."""

    wanted = False


@dataclass(frozen=True)
class Exchanges:
    """A replica's exchanges with the other ranks."""

    sync: GradientSync  # Sums gradients in every step.
    outer: OuterSync  # Averages parameters at the end of a round of local steps.
    steps: StepGather  # Gathers the loss and the statistics of every step.
    totals: StepTotals  # Sums counts and buffers in every step.


def make_exchanges(config: EngineConfig, state: TrainingState, world: World, plan: BatchPlan) -> Exchanges:
    model, share = state.model, plan.shares[world.rank]
    weight = share / plan.global_batch
    outer = make_outer_sync(config.sync, model, world, weight)
    if config.sync.is_outer:
        sync: GradientSync = NoExchange(model)
    else:
        sync = make_gradient_sync(config.sync, model, world, tokens=_tied_rows(model, plan))
    set_collective_timeout(world, exchange_timeout_s(config.sync, outer))
    return Exchanges(sync, outer, StepGather(world, outer.lag_steps), StepTotals(world, state.buffers(), weight))


def _tied_rows(model: nn.Module, plan: BatchPlan) -> int | None:
    """Return the rows of a tied embedding that a rank's last micro-batch touches at most."""
    if not isinstance(model, HasTiedHead):
        return None
    return model.rows_per_sample * max(plan.sizes(rank)[-1] for rank in range(len(plan.shares)))


def no_exchanges(model: nn.Module, world: World, steps: StepGather | None = None) -> Exchanges:
    """Return the exchanges of a replica that has no process group."""
    totals = StepTotals(without_group(world), {}, 1.0)
    return Exchanges(NoExchange(model), EveryStep(), steps or StepGather(world), totals)


def exchange_timeout_s(sync: SyncConfig, outer: OuterSync) -> float:
    """Return how long a rank waits for a peer: a rank that may run ahead waits for as many steps of the slowest."""
    return sync.timeout_s * (1 + outer.lag_steps)


class UnsettledStep(NamedTuple):
    """A step of which this rank does not know the world's loss yet."""

    began: Progress  # Where it began.
    plan: BatchPlan  # How its batch was divided.


@dataclass
class StepWork:
    """What this rank has done of a step so far."""

    micro_batches: int = 0
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    terms: int = 0  # Terms of the loss: samples, or what the program counts instead, such as tokens.


@dataclass
class Engine:
    config: EngineConfig  # `config.sync` is the resolved sync mode in use, never `auto`.
    world: World
    state: TrainingState
    exchanges: Exchanges
    plan: BatchPlan
    timer: StepTimer
    recorder: Recorder
    stop: StopRequest
    progress: Progress
    fence: Fence = field(default_factory=OpenFence)  # Decides what this rank may still do in its generation.
    largest_micro_batch: int = 1  # The largest micro-batch that there is memory for.
    # Micro-batches keep their shape when the batch is divided anew: the model is compiled for it.
    has_fixed_shapes: bool = False
    # Whether torch's random numbers follow from seed, rank and step, so that a step is the same when it is done again.
    seeds_steps: bool = True
    # Puts the model and the optimizers back to their states before the first step; None if that is not possible.
    reset: Callable[[], None] | None = None
    # `reset` holds a copy of that state: it is freed with the first checkpoint, to which a run can return instead.
    is_reset_copy: bool = False
    # The advice in the error about a training that diverges.
    lower_rate_advice: str = "train with a lower learning rate"
    launched_ranks: int = 0  # Ranks at launch. A rank that joined later has a higher id.
    # The lineages before this launch's first one, and the step after which each was left.
    history: tuple[tuple[str, int], ...] = ()
    # The last step whose periodic tasks are done, and by task the last step at which it was done. The same on all
    # ranks, or some would wait in an exchange that others skip.
    periodic_done_step: int = 0
    tasks_done: dict[str, int] = field(default_factory=dict)
    stragglers: Stragglers = field(default_factory=Stragglers)
    balance: Balance = field(default_factory=Balance)  # Makes the shares of the batch follow the ranks' speeds.
    is_trial: bool = False  # This step tries another setup of the ranks: its times say nothing about the machines.
    leave_out: Callable[[], None] | None = None  # Makes this machine a spare; None where members cannot change.
    times: dict[str, float] = field(default_factory=dict)  # Seconds of the last step by phase.
    watch: NodeWatch | None = None  # Samples this machine beside training.
    disk_s: float = 0.0  # This rank wrote checkpoints for so long since its last step.
    # Rates and other objects' states at the last common step, where a lost peer undoes a round; see `copy_schedule`.
    round_start: StateTree | None = None
    _tasks_done_at_round_start: int = 0  # `periodic_done_step` at that time.
    # Called on every rank after a step that another one follows.
    between_steps: Callable[[], None] = field(default=lambda: None)
    _unsettled: deque[UnsettledStep] = field(default_factory=deque)
    _leaves_at_boundary: bool = False  # All ranks have agreed to leave the generation together after a step.
    _nonfinite: StepResult | None = None  # This rank's first result that was not finite.
    _work: StepWork = field(default_factory=StepWork)
    _backward_ended: float = 0.0  # When the last micro-batch had its backward.
    _has_checked_gradients: bool = False  # Every parameter had a gradient in the first step.
    # Terms of the loss in every sample; 0 if they vary, None before the first step of a world.
    _terms_per_sample: int | None = None

    # A step, in the order of the calls.

    def begin_step(self) -> None:
        """Begin the next step, or the same one again after a lost peer: from the same state either way."""
        if self.recorder.profiler is not None:
            self.recorder.profiler.before_step(self.progress.step + 1)
        self.timer.start()
        self._work = StepWork()
        if self.seeds_steps:
            # A function of rank and step instead of a running generator: resuming is exact without saving its state.
            seed_generators((self.config.train.seed + self.world.rank) * _SEED_STRIDE + self.progress.step + 1)
        self.exchanges.totals.remember()

    def backward(self, loss: Tensor, terms: int | None = None) -> None:
        """Add the gradients of a micro-batch. `loss` is a sum of `terms` terms: by default one for each sample."""
        work, sizes = self._work, self.plan.sizes(self.world.rank)
        count = len(sizes)
        work.micro_batches += 1
        if work.micro_batches > count:
            raise UsageError(
                f"step {self.progress.step + 1} has {count} micro-batches on this rank, and backward was called again",
                why="each micro-batch has one backward: gradients travel with the last one",
                fix="add the losses of a micro-batch, and call step.backward once for it",
            )
        samples = sizes[work.micro_batches - 1]
        work.terms += samples if terms is None else terms
        if self._terms_per_sample is None:
            # Before the first backward of this world: all micro-batches of a step are divided by the same number.
            self._terms_per_sample = 1 if terms is None else self._agree_on_terms(terms, samples)
        is_last = work.micro_batches == count
        if is_last:
            self._start_totals()
        with self.timer.phase("backward"):
            scaled = loss * self.sync.loss_scale(self._expected_terms())
            self.sync.backward(scaled if self._scaler is None else self._scaler.scale(scaled), is_last)
            # A new tensor, on the device of the loss.
            work.loss_sum = loss.detach().double() + work.loss_sum
        self._backward_ended = time.perf_counter()

    def update(
        self,
        clip: float | None = None,
        after: Callable[[], object] | None = None,
        make_fields: Callable[[], dict[str, Any]] = dict,
    ) -> bool:
        """Exchange, clip, apply and record the step; return whether any rank is known to want to stop.

        `after` is called with the update: both happen, or none. `make_fields` returns more fields of the step's event.
        """
        step, work = self.progress.step + 1, self._work
        if work.micro_batches < self.plan.counts[self.world.rank]:
            raise self._too_early(step)
        if not self._has_checked_gradients:
            # Some exchanges would fill in zeros, others wait forever: refuse it in all of them, and on one rank too.
            check_gradients(self.model)
            self._has_checked_gradients = True
        with self.timer.phase("backward"):
            # What the program did since its last backward is its own work, and no part of the exchange. Read inside the
            # phase, so that the exchange is never longer than it.
            between_s = time.perf_counter() - self._backward_ended
            comm = self.sync.finish()
        comm = replace(comm, tail_s=max(0.0, comm.tail_s - between_s))
        # The exchange of this step has succeeded: every rank had applied the step before it.
        self._commit()
        total_terms = self._finish_totals()
        result, is_queued = self._finish_gradients(step, clip, can_queue=after is None)
        part_of_loss = self._part_of_loss(result.loss, total_terms)
        gathered = part_of_loss if result.is_finite or self._scaler is not None else math.nan
        own_times = OwnTimes(self.timer.seconds.get("data", 0.0), self._take_gc_s(), self.disk_s)
        self.disk_s = 0.0
        node = NodeStats() if self.watch is None else self.watch.recent()
        # Not up to now: the exchange may have waited for a slower rank.
        work_s = comm.ready_at - self.timer.began
        self.step_gather.begin(gathered, comm, self.stop.wanted, self.fence.stop_after_step, work_s, own_times, node)
        self._judge(result, is_queued)
        if not is_queued:
            self._apply(step, after)
        outer_times = self._outer_step(step)
        self.fence.set_step(self.outer.common_step(step))
        stats = self.step_gather.finish()
        self._split_comm_time("backward", comm, stats[-1].wait_s if comm.wait_s is None else comm.wait_s)
        self._split_comm_time("optimizer", outer_times, outer_times.wait_s or 0.0)
        self.timer.add("wait", self.step_gather.late_s)
        wants_stop = self._settle(stats)
        self._record(step, (comm, outer_times), own_loss=result.loss, grad_norm=result.norm, **make_fields())
        if not self.is_trial:
            self._warn_of_stragglers(stats)
            self._rebalance(stats)
        return wants_stop

    def roll_back(self) -> int:
        """After a failed exchange, return to a state that others can continue from; return its step."""
        step = self.outer.roll_back(self.progress.step)
        if step != self.progress.step:
            self.return_to_round_start()
        return step

    def return_to_round_start(self) -> None:
        """Undo what an unfinished round has changed beside the parameters. The moments stay each rank's own.

        Periodic tasks may change attached objects: those of the common step are done again, if they came after it.
        """
        self.exchanges.totals.roll_back()
        if self.round_start is not None:
            self.state.load_schedule(self.round_start)
            self.periodic_done_step = self._tasks_done_at_round_start

    def mark_round_start(self, schedule: StateTree | None = None) -> None:
        """Keep the schedule of the common step: that of now, or the one a checkpoint has."""
        if self.outer.commits_by_round:
            self.round_start = schedule or self.state.copy_schedule()
            self._tasks_done_at_round_start = self.periodic_done_step

    def drop_step(self) -> None:
        """Undo what a step that is not finished has changed: gradients, buffers, and what a scaler knows of them."""
        self.exchanges.totals.restore()
        self.zero_grad()
        if self._scaler is not None and self._work.micro_batches:
            # With its own scale: that only forgets that gradients were unscaled, which it refuses to do twice.
            self._scaler.update(self._scaler.get_scale())

    @property
    def sync(self) -> GradientSync:
        return self.exchanges.sync

    @property
    def outer(self) -> OuterSync:
        return self.exchanges.outer

    @property
    def step_gather(self) -> StepGather:
        return self.exchanges.steps

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @property
    def _scaler(self) -> GradScaler | None:
        """The attached object that scales losses for fp16."""
        return next((other for other in self.state.others if isinstance(other, GradScaler)), None)

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    @property
    def weight(self) -> float:
        """This rank's part of the global batch."""
        return self.plan.shares[self.world.rank] / self.plan.global_batch

    def common_weights(self) -> dict[str, Tensor]:
        """Return the weights that all ranks have in common. Call it inside `outer.common()`."""
        weights = self.state.weights()
        if self.outer.differs_now:
            weights |= dict(zip(self.state.buffers(), self.exchanges.totals.common, strict=True))
        return weights

    def zero_grad(self) -> None:
        for parameter in self.state.all_parameters:
            parameter.grad = None

    def settle(self) -> bool:
        """Wait for the statistics of all steps so far; return whether any rank wants to stop."""
        return self._settle(self.step_gather.drain())

    def unsettled_steps(self) -> list[UnsettledStep]:
        return list(self._unsettled)

    def leave_at_boundary(self) -> None:
        """Raise `StepBoundary` if all ranks have agreed to leave the generation together.

        Inside a round, wait for its end: the next generation would do the steps of an unfinished round again.
        """
        if self._leaves_at_boundary and self.outer.common_step(self.progress.step) == self.progress.step:
            raise StepBoundary(f"all ranks stop together after step {self.progress.step}")

    def leave_world(self) -> None:
        """Release every reference to the process group of a world that has ended."""
        with suppress(OSError, RuntimeError, ShoalError):
            self.sync.close()
        self.exchanges = no_exchanges(self.model, self.world, self.step_gather)
        self.step_gather.close()
        self.recorder.leave_world()
        self.world = without_group(self.world)

    def enter_world(self, world: World, step: int, cursor: int, launched_ranks: int) -> None:
        """Continue in another world at `step`; drop the gradients and results of the last one."""
        self.world = world
        self.set_launched_ranks(launched_ranks)
        self.move_to(step, cursor)
        self._unsettled.clear()
        self._leaves_at_boundary, self._nonfinite, self._terms_per_sample = False, None, None
        # The same on ranks that were there and on those that join: all count the steps by which shares are judged.
        self.is_trial = False
        self.zero_grad()

    def set_launched_ranks(self, launched_ranks: int) -> None:
        """Set the number of ranks at launch, and start to judge stragglers anew."""
        self.launched_ranks = launched_ranks
        self.stragglers.reset(self.world.names, self.follows_speed)
        self.balance.reset()

    def set_plan(self, plan: BatchPlan, largest_micro_batch: int) -> None:
        self.plan, self.largest_micro_batch = plan, largest_micro_batch

    def weights_of(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the shares of the ranks with these ids, relative to each other: by speed if that was measured."""
        return self.balance.weights(ids) or weights_of(self.config.run, ids)

    def saved_shares(self) -> Shares | None:
        """Return the shares of the next step for a checkpoint; None if they do not follow speeds."""
        if not self.balance.weights(self.world.ids):
            return None
        return Shares(self.plan.micro_batch, self.world.ids, self.plan.shares, dict(self.balance.speeds))

    def restore_shares(self, saved: Shares | None) -> None:
        """Divide the batch as a checkpoint's ranks did, or by their speeds if its ranks were others."""
        if saved is None or not self.balance.is_on:
            return
        self.balance.adopt(saved.speeds)
        plan = BatchPlan(saved.micro_batch, saved.shares)
        if saved.ids != self.world.ids or plan.global_batch != self.global_batch:
            weights = self.weights_of(self.world.ids)
            plan = redivide_batch(self.global_batch, self.largest_micro_batch, weights, self._keeps_micro_batch)
        self.change_plan(plan)

    def change_plan(self, plan: BatchPlan) -> None:
        """Divide the following batches in another way, between two steps. All ranks call it after the same step."""
        self.sync.resize(_tied_rows(self.model, plan) or 0)
        self.plan = plan
        self.exchanges.totals.weight = self.weight
        self.outer.set_weight(self.weight)

    def settle_micro_batches(self) -> None:
        """Choose the size of micro-batches, when it is known whether the model is compiled.

        The first shares are whole micro-batches, which are small where the shares are unequal: where their size may
        change, a share is computed in as few as there is memory for. Shares of a resumed run may be of any size: a
        model that was compiled since needs whole micro-batches.
        """
        plan, most = self.plan, self.largest_micro_batch
        if not self._keeps_micro_batch:
            if plan.micro_batch < most:
                self.change_plan(BatchPlan(most, plan.shares))
        elif not plan.is_whole:
            weights = self.weights_of(self.world.ids)
            self.change_plan(redivide_batch(plan.global_batch, most, weights, is_compiled=True))

    def set_sync(self, sync: SyncConfig) -> None:
        """Set the sync mode of the exchanges that `connect` makes next."""
        self.config = self.config.model_copy(update={"sync": sync})

    def connect(self) -> None:
        """Make the exchanges with the ranks of this world."""
        self.exchanges = make_exchanges(self.config, self.state, self.world, self.plan)
        self.mark_round_start()

    def change_sync(self, sync: SyncConfig) -> None:
        """Replace the exchanges between two steps, when all ranks have done the last one and their models are equal."""
        self.sync.close()
        # Free the old buffers before new ones are allocated: gradients of 124M parameters are 496 MB.
        self.exchanges = no_exchanges(self.model, self.world, self.step_gather)
        gc.collect()
        self.set_sync(sync)
        self.connect()
        self.outer.rewind(self.progress.step, in_flight=0)

    def set_history(self, history: Sequence[tuple[str, int]]) -> None:
        self.history = tuple((lineage, step) for lineage, step in history)

    def move_to(self, step: int, cursor: int) -> None:
        """Set the position of the training: steps done, and the global position of the next sample."""
        lineage = self.world.lineage
        # After a return to a checkpoint only the history has the step at which a lineage was left, not the agents.
        known = {name for name, _ in self.history}
        forks = tuple((str(fork.lineage), fork.step) for fork in lineage.forks if str(fork.lineage) not in known)
        generation = str(self.world.generation)
        self.progress = Progress(step, cursor, generation, str(lineage.name), (*self.history, *forks))

    def restore_periodic(self, done_step: int, tasks_done: dict[str, int] | None = None) -> None:
        self.periodic_done_step, self.tasks_done = done_step, dict(tasks_done or {})
        self._tasks_done_at_round_start = done_step

    def mark_saved(self) -> None:
        """Free the copy of the state before the first step: there is a checkpoint now."""
        if self.is_reset_copy:
            self.reset = None

    def mark_periodic_done(self, step: int) -> None:
        self.periodic_done_step = step

    def mark_task_done(self, name: str) -> None:
        self.tasks_done[name] = self.progress.step

    def _too_early(self, step: int) -> UsageError:
        done, count = self._work.micro_batches, self.plan.counts[self.world.rank]
        return UsageError(
            f"step {step} was updated after {done} of its {count} micro-batches on this rank",
            why="every sample of the global batch belongs to the step, and the other ranks wait for these",
            fix="call step.backward for every batch of step.batches(...), and step.update after the last one",
        )

    def _expected_terms(self) -> int:
        """Return the terms of this step's loss, or the number of its samples if they vary.

        The loss is the world's, or this rank's own where replicas train alone.
        """
        samples = self.plan.shares[self.world.rank] if self.outer.replicas_differ else self.global_batch
        return samples * (self._terms_per_sample or 1)

    def _start_totals(self) -> None:
        """Start the sums that the step needs beside the gradients, before the last backward."""
        work, own_samples = self._work, self.plan.shares[self.world.rank]
        if self._terms_per_sample and work.terms != self._terms_per_sample * own_samples:
            raise UsageError(
                f"step {self.progress.step + 1}: {own_samples} samples have {work.terms} terms, and the first ones "
                f"had {self._terms_per_sample} each",
                why="ranks that count differently from step to step must exchange their counts in every step",
                fix="say so: shoal.Session(..., count_varies=True)",
            )
        if not self.outer.replicas_differ and (self._terms_per_sample == 0 or self.exchanges.totals.has_buffers):
            self.exchanges.totals.start(work.terms)

    def _agree_on_terms(self, terms: int, samples: int) -> int:
        """Return how many terms every sample has on all ranks; 0 if that differs."""
        rows = gather_integers(self.world, [terms, samples])
        per_sample = {divmod(own_terms, own_samples) for own_terms, own_samples in rows}
        if self.config.train.count_varies or len(per_sample) > 1:
            return 0
        [(quotient, rest)] = per_sample
        return 0 if rest else quotient

    def _finish_totals(self) -> int:
        """Wait for the sums; return the terms of all ranks' losses.

        Where their number varies, the gradients were divided by the number of samples: correct that.
        """
        total = self.exchanges.totals.finish()
        if not self._terms_per_sample:
            is_own = self.outer.replicas_differ
            divided_by = self.plan.shares[self.world.rank] if is_own else self.global_batch
            for parameter in self.state.all_parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(divided_by / max(1, self._work.terms if is_own else total))
        return total

    def _part_of_loss(self, mean_loss: float, total_terms: int) -> float:
        """Return this rank's part of the world's mean loss."""
        if self._terms_per_sample or self.outer.replicas_differ:
            return mean_loss * self.weight
        return mean_loss * max(1, self._work.terms) / max(1, total_terms)

    def _commit(self) -> None:
        """Commit the steps that every rank has done.

        A round that ends with an exchange of its own may have ended on this rank and not yet on the others: it counts
        once all ranks have begun another step. That is known later than a short round lasts, so commit up to the newest
        round that is known to have ended everywhere.
        """
        through = self.outer.common_step(self.progress.step)
        if self.outer.commits_by_round:
            every = self.outer.round_steps
            through = min(through, self.recorder.newest_pending // every * every)
        self.recorder.commit(through)

    def _finish_gradients(self, step: int, clip: float | None, can_queue: bool) -> tuple[StepResult, bool]:
        """Clip the gradients; return the step's loss and norm, for which a GPU is waited for once.

        Return also whether the update is in the GPU's queue already, under the condition that both are finite.
        """
        first = self.progress.cursor + self.plan.offset(self.world.rank)
        own_samples = (first, first + self.plan.shares[self.world.rank])
        can_queue = can_queue and self._can_queue_update
        with self.timer.phase("optimizer"):
            if self._scaler is not None:
                for optimizer in self.state.optimizers:
                    self._scaler.unscale_(optimizer)
            norm = gradient_norm(self.state.all_parameters)
            numbers = StepNumbers(self._work.loss_sum, norm)
            if can_queue:
                with self.fence.apply_step(self.outer.common_step(step)):
                    update_if_finite(self.state.optimizers, self._work.loss_sum, norm, clip)
                    self._advance(step)
                self.zero_grad()
            loss_sum, norm_value = numbers.read()
            if not can_queue:
                clip_gradients(self.state.all_parameters, norm_value, math.inf if clip is None else clip)
        return StepResult(step, loss_sum / max(1, self._work.terms), norm_value, own_samples), can_queue

    @property
    def _can_queue_update(self) -> bool:
        """Whether the GPU can decide on the update.

        Not where a lost peer can leave half a sum in the GPU's memory (NCCL), and not beside ranks that clip on a
        processor, with other bits.
        """
        world = self.world
        is_alone = world.device.type == "cuda" and world.gpu_group is None and "cpu" not in world.devices
        decides = self._scaler is None and self._nonfinite is None and can_decide_on_gpu(self.state.optimizers)
        return is_alone and decides

    def _judge(self, result: StepResult, is_queued: bool) -> None:
        """Remember a result that is not finite, and refuse the step if all ranks know of it.

        Where gradients are summed every rank has the same norm, so all refuse the step here. In the other modes the
        peers learn of it later: until then this rank continues without updates, so what it sends stays finite.
        """
        # A grad scaler tries scales that are too large on purpose, and leaves such a step out.
        is_expected = self._scaler is not None and math.isfinite(result.loss)
        if not result.is_finite and not is_expected:
            self._nonfinite = self._nonfinite or result
        if not math.isfinite(result.norm) and not is_expected and not self.outer.replicas_differ:
            if is_queued:
                # The GPU has left the update out: this is still the state before the step.
                began = self._unsettled.pop().began
                self.move_to(began.step, began.cursor)
                self.fence.set_step(began.step)
            self._refuse_step()

    def _apply(self, step: int, after: Callable[[], object] | None) -> None:
        """Apply the step, unless a result was not finite."""
        with self.timer.phase("optimizer"):
            with self.fence.apply_step(self.outer.common_step(step)):
                if self._nonfinite is None:
                    for optimizer in self.state.optimizers:
                        optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
                    if self._scaler is not None:
                        self._scaler.update()
                self._advance(step, after)
            self.zero_grad()

    def _advance(self, step: int, after: Callable[[], object] | None = None) -> None:
        """Advance everything that goes with an update."""
        if self._nonfinite is None:
            for other in self.state.others:
                if isinstance(other, LRScheduler) and not isinstance(other, ReduceLROnPlateau):
                    other.step()
            if after is not None:
                after()
        self._unsettled.append(UnsettledStep(self.progress, self.plan))
        self.move_to(step, self.progress.cursor + self.global_batch)

    def _outer_step(self, step: int) -> CommTimes:
        with self.timer.phase("optimizer"):
            try:
                times = self.outer.after_inner_step(step, last=step == self.config.train.steps)
            except NonFiniteExchange:
                self._refuse_step()
                raise
            if self.outer.common_step(step) == step:
                self.mark_round_start()
            # Streaming replicas always differ: their buffers are averaged once in a round.
            is_round_end = not self.outer.differs_now or step % self.outer.round_steps == 0
            if self.outer.replicas_differ and is_round_end:
                self.exchanges.totals.average_buffers()
            return times

    def _split_comm_time(self, phase: str, comm: CommTimes, wait_s: float) -> None:
        """Move the communication at the end of a phase to `wait` (for a peer) and `exposed` (the network)."""
        wait_s = min(max(wait_s, 0.0), comm.tail_s)
        self.timer.move(phase, "wait", wait_s)
        self.timer.move(phase, "exposed", comm.tail_s - wait_s)

    def _settle(self, known: list[StepStats]) -> bool:
        """Propose the steps whose statistics have arrived from all ranks for the next commit."""
        for stats in known:
            began, plan = self._unsettled.popleft()
            if not math.isfinite(stats.loss_sum):
                self._refuse_step()
            self.recorder.propose(began.step + 1, began.cursor, plan, stats.loss_sum)
            self._leaves_at_boundary |= stats.stop_after_step
        return any(stats.stop for stats in known)

    def _record(self, step: int, exchanges: tuple[CommTimes, ...], **fields: Any) -> None:
        self.times = self.timer.finish()
        if (exchanged_s := self._exchanged_s(*exchanges)) is not None:
            fields["exchanged_s"] = round(exchanged_s, 7)
        for name, seconds in (
            ("allreduce", [comm.allreduce_s for comm in exchanges if comm.allreduce_s is not None]),
            ("hidden", [comm.hidden_s for comm in exchanges if comm.hidden_s is not None]),
        ):
            if seconds:
                self.times[name] = sum(seconds)
        self.recorder.step(step, self.times, samples=self.global_batch, **fields)

    def _exchanged_s(self, comm: CommTimes, outer_times: CommTimes) -> float | None:
        """Return the time from the step's begin to the end of the exchange that all ranks left together; None if there
        was none. `shoal trace` puts the clocks of all nodes on one axis by it."""
        if self.world.size < 2 or self.outer.differs_now:
            return None
        times = outer_times if self.outer.replicas_differ else comm
        return times.ready_at + times.tail_s - self.timer.began if times.ready_at else None

    def _take_gc_s(self) -> float:
        return 0.0 if self.watch is None else self.watch.take_gc_s()

    def _warn_of_stragglers(self, known: list[StepStats]) -> None:
        """Judge on all ranks, and warn on one: the slow rank itself, which alone knows the programs on its machine."""
        work, least, exposed_s = self.balance.work_of(self.plan), self._division.unit, self.times.get("exposed", 0.0)
        top_process = "" if self.watch is None else self.watch.top_process
        for stats in known:
            step_s, step = self.times["step"], self.progress.step
            for slow in self.stragglers.observe(
                stats.by_rank, self.plan.shares, step_s, exposed_s, step, top_process, work, least
            ):
                if self.world.is_main if slow.rank is None else self.world.rank == slow.rank:
                    self.recorder.warn(slow, step=step, **slow.fields)

    def _rebalance(self, known: list[StepStats]) -> None:
        """Let the shares follow the speeds. All ranks know the same times, so all change their shares in this step.

        Where replicas train alone, a rank's share is its weight in the next exchange: it changes with the round.
        """
        if not self.follows_speed and self.config.members.drop_slower_than is None:
            return
        for stats in known:
            self.balance.observe([RankTime(rank.work_s, rank.ready_s - rank.work_s) for rank in stats.by_rank])
        step = self.progress.step
        if step % self.outer.round_steps or step >= self.config.train.steps:
            return
        change = None
        if self.follows_speed:
            change = self.balance.judge(self.plan, self._division, self.world.ids, self.outer.lag_steps)
        if change is None:
            self._judge_machines()
            return
        self.change_plan(change.plan)
        self.stragglers.change_shares(self.outer.lag_steps)
        self.recorder.event(
            "shares",
            step=step,
            micro_batch=change.plan.micro_batch,
            shares=list(change.plan.shares),
            ids=list(self.world.ids),
            speeds=list(change.speeds),
            why=describe_change(change, self.world.names),
        )

    def _judge_machines(self) -> None:
        """Leave out a machine that is too slow, if the user wants that; otherwise name one that does not help.

        All ranks know the same times. Each machine's agent decides nothing: its ranks send it the decision.
        """
        world, members, step = self.world, self.config.members, self.progress.step
        count, limit = len(set(world.nodes)), members.drop_slower_than
        slow = self.balance.slow_machine(self.plan, self._division, world.nodes if count > 1 else world.names)
        if slow is None:
            return
        can_leave_out = self.leave_out is not None and count > max(1, members.min_nodes)
        if can_leave_out and limit is not None and slow.most_speed < limit:
            if not self.balance.leave_out([world.ids[rank] for rank in slow.ranks], count):
                return
            if world.rank in slow.ranks and self.leave_out is not None:
                self.leave_out()
            elif world.rank == min(rank for rank in range(world.size) if rank not in slow.ranks):
                self.recorder.event("note", step=step, text=describe_left_out(slow, limit))
        elif slow.is_useless and self.balance.is_news(slow.name) and world.is_main:
            self.recorder.warn(useless_warning(slow, self.plan, can_leave_out), step=step)

    @property
    def follows_speed(self) -> bool:
        """Whether shares follow speed. Without a setting, ranks of one machine and of one kind count as equal."""
        run, world = self.config.run, self.world
        is_set = run.balance is not None or run.speeds is not None or run.devices is not None
        can_differ = is_set or world.local_size < world.size
        return self.balance.is_on and world.size > 1 and can_differ

    @property
    def _division(self) -> Division:
        """How the batch may be divided: in whole micro-batches where they keep their size.

        After a recovery they may be no whole ones any more (see `redivide_batch`).
        """
        if not self._keeps_micro_batch:
            return Division(1, self.largest_micro_batch)
        micro_batch = self.plan.micro_batch
        return Division(micro_batch if self.plan.is_whole else 1, micro_batch)

    @property
    def _keeps_micro_batch(self) -> bool:
        """Whether micro-batches keep their size: it was set, or the model is compiled or normalised over them."""
        is_set = self.has_fixed_shapes or self.config.train.micro_batch is not None
        return is_set or self._has_fixed_layers

    @cached_property
    def _has_fixed_layers(self) -> bool:
        return any(isinstance(module, _BatchNorm) or _is_compiled(module) for module in self.model.modules())

    def _refuse_step(self) -> None:
        """Raise the error that names the culprits; all ranks get here in the same step and can still exchange."""
        error = explain_refusal(self.world, self._nonfinite, self.state.all_parameters, self.lower_rate_advice)
        if error is not None:
            raise error


def seed_generators(seed: int) -> None:
    """Seed as `torch.manual_seed`, but only the generators of devices in use.

    For every kind of accelerator that is not in use torch notes the call with a formatted stack: 0.5 ms each time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Let the processor take numbers below 1e-38 as zero.

    It computes with them many times slower, and the gradients of a softmax that has become certain are full of them: a
    step of shoal's small GPT takes up to 1.4 times as long (docs/results.md).
    """
    was_set = bool(torch.full((), 1e-40) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a program compiled this module, by `torch.compile(module)` or `module.compile()`.

    shoal's own blocks do not count: they differ between CPUs and GPUs, and all ranks agree on `has_fixed_shapes`.
    """
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return is_compiled and not hasattr(module, "takes_any_batch")


def describe_exchanges(engine: Engine) -> dict[str, object]:
    """Return the fields of `start` and `choice` events about the exchanges."""
    sync = engine.config.sync
    return {
        "sync": sync.mode,
        "wire": sync.wire,
        "grad_bytes": grad_bytes(shapes_of(engine.state), sync.wire) + engine.sync.extra_bytes,
        "round_steps": engine.outer.round_steps,
        "wire_made_by": kernel_or_plain(sync.wire),
        "inside": engine.sync.inside.way,
        "inside_note": engine.sync.inside.note,
    }


def shapes_of(state: TrainingState) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all parameters that are trained."""
    return tuple(tuple(parameter.shape) for parameter in state.parameters().values())

"""What a rank holds of the training, and the methods that change it.

A replica is a model with its optimizers and other attached objects, the position of the training, the division of the
batch, and the exchanges with the other ranks of its world. `engine.step` trains it, `engine.recover` moves it to the
next world, `engine.saving` and `engine.resume` save and load it. No other module assigns its fields; what has an owner
of its own is changed there (`division`, and by the step and the loop `steps` and `periodic`).

A replica in parts would differ in its state (this rank's parts of the weights and moments) and in its exchanges (which
gather and scatter them), and in nothing else here.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.config.schema import EngineConfig, SyncConfig
from shoal.cost.batch_plan import BatchPlan
from shoal.engine.checkpoint import BestValue, Progress, Shares
from shoal.engine.division import BatchDivision
from shoal.engine.epochs import ends_epoch
from shoal.engine.exchanges import Exchanges, make_exchanges, no_exchanges
from shoal.engine.recorder import Recorder
from shoal.engine.refusal import StepResult
from shoal.engine.replica_shards import ReplicaShards
from shoal.engine.training_state import StateTree, TrainingState
from shoal.errors import ShoalError
from shoal.sync.fence import Fence, OpenFence, StepBoundary
from shoal.sync.gradients import GradientSync, NoExchange, make_gradient_sync
from shoal.sync.outer import OuterSync
from shoal.sync.world import World, without_group


class UnsettledStep(NamedTuple):
    """A step of which this rank does not know the world's loss yet."""

    began: Progress  # Where it began.
    plan: BatchPlan  # How its batch was divided.


@dataclass
class WorldSteps:
    """What a rank knows of its steps in one world. The next world begins with nothing."""

    last_step: int  # Of the training: all ranks may agree that it needs no more.
    unsettled: deque[UnsettledStep] = field(default_factory=deque)
    leaves_at_boundary: bool = False  # All ranks have agreed to leave the generation together after a step.
    nonfinite: StepResult | None = None  # This rank's first result that was not finite.
    # Terms of the loss in every sample; 0 if they vary, None before the first step.
    terms_per_sample: int | None = None


@dataclass
class PeriodicProgress:
    """Which periodic tasks are done. The same on all ranks, or some would wait in an exchange that others skip."""

    done_step: int = 0  # The last step whose tasks are all done.
    tasks_done: dict[str, int] = field(default_factory=dict)  # By task, the last step at which it was done.
    reported_step: int = 0  # The last step for which a main rank has called the functions of `session.on_step`.
    running: str = ""  # The task that is at work.
    is_judged: bool = False  # `session.best` was called for the present step.
    best: BestValue | None = None  # The present step is the best one so far: its checkpoint is due.


@dataclass
class RoundStart:
    """The last common step, where a lost peer undoes a round."""

    schedule: StateTree | None = None  # Rates and other objects' states; see `copy_schedule`.
    periodic_done_step: int = 0


@dataclass
class InitialState:
    """How the model and the optimizers are put back to their states before the first step."""

    reset: Callable[[], None] | None = None  # None if that is not possible.
    # `reset` holds a copy of that state: it is freed with the first checkpoint, to which a run can return instead.
    is_copy: bool = False

    def free_copy(self) -> None:
        """Free the copy of that state: there is a checkpoint now."""
        if self.is_copy:
            self.reset, self.is_copy = None, False


class Replica:
    def __init__(
        self,
        config: EngineConfig,
        world: World,
        state: TrainingState,
        recorder: Recorder,
        fence: Fence | None = None,
        initial: InitialState | None = None,
    ) -> None:
        self.config = config  # `config.sync` is the resolved sync mode in use, never `auto`.
        self.world = world
        self.state = state
        self.recorder = recorder
        self.fence = fence or OpenFence()  # Decides what this rank may still do in its generation.
        self.initial = initial or InitialState()
        self.exchanges: Exchanges = no_exchanges(state.model, world)
        self.division = BatchDivision(config, state.model, world.size)
        self.progress = Progress(step=0, cursor=0)
        # The lineages before this launch's first one, and the step after which each was left.
        self.history: tuple[tuple[str, int], ...] = ()
        self.periodic = PeriodicProgress()
        self.round_start = RoundStart()
        self.steps = WorldSteps(config.train.steps)
        self.shards = ReplicaShards(state)

    @property
    def sync(self) -> GradientSync:
        return self.exchanges.sync

    @property
    def outer(self) -> OuterSync:
        return self.exchanges.outer

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @property
    def scaler(self) -> GradScaler | None:
        """The attached object that scales losses for fp16, unless it is switched off."""
        scalers = (other for other in self.state.others if isinstance(other, GradScaler))
        return next((scaler for scaler in scalers if scaler.is_enabled()), None)

    @property
    def plan(self) -> BatchPlan:
        return self.division.plan

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    @property
    def share(self) -> int:
        """This rank's samples of a step."""
        return self.plan.shares[self.world.rank]

    @property
    def weight(self) -> float:
        """This rank's part of the global batch."""
        return self.share / self.plan.global_batch

    @property
    def is_at_common_step(self) -> bool:
        """Whether all replicas are equal after the present step: no round of outer steps is under way."""
        return self.outer.common_step(self.progress.step) == self.progress.step

    def common_weights(self) -> dict[str, Tensor]:
        """Return the weights that all ranks have in common. Call it inside `outer.common()`."""
        weights = self.state.weights()
        if self.outer.differs_now:
            weights |= dict(zip(self.state.buffers(), self.exchanges.totals.common, strict=True))
        return weights

    # The position in the training.

    def move_to(self, step: int, cursor: int) -> None:
        """Set the position of the training: steps done, and the global position of the next sample."""
        lineage = self.world.lineage
        # After a return to a checkpoint only the history has the step at which a lineage was left, not the agents.
        known = {name for name, _ in self.history}
        forks = tuple((str(fork.lineage), fork.step) for fork in lineage.forks if str(fork.lineage) not in known)
        generation = str(self.world.generation)
        self.progress = Progress(step, cursor, generation, str(lineage.name), (*self.history, *forks))

    def set_history(self, history: Sequence[tuple[str, int]]) -> None:
        self.history = tuple((lineage, step) for lineage, step in history)

    def commit_done_steps(self) -> None:
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

    def restore_periodic(
        self, done_step: int, tasks_done: dict[str, int] | None = None, reported_step: int = 0
    ) -> None:
        reported_step = max(reported_step, self.periodic.reported_step)
        self.periodic = PeriodicProgress(done_step, dict(tasks_done or {}), reported_step)
        self.round_start.periodic_done_step = done_step

    def advance(self, step: int, after: Callable[[], object] | None = None) -> None:
        """Advance everything that goes with an update to `step`."""
        cursor = self.progress.cursor + self.global_batch
        if self.steps.nonfinite is None:
            for other in self.state.others:
                is_due = other not in self.state.epoch_schedulers or ends_epoch(self, cursor)
                if isinstance(other, LRScheduler) and not isinstance(other, ReduceLROnPlateau) and is_due:
                    other.step()
            if after is not None:
                after()
        self.steps.unsettled.append(UnsettledStep(self.progress, self.plan))
        self.move_to(step, cursor)

    # What a lost peer undoes.

    def drop_gradients(self) -> None:
        self.shards.drop_gradients()
        for parameter in self.state.all_parameters:
            parameter.grad = None

    def roll_back(self) -> int:
        """After a failed exchange, return to a state that others can continue from; return its step."""
        step = self.outer.roll_back(self.progress.step)
        if step != self.progress.step:
            self._return_to_round_start()
        return step

    def _return_to_round_start(self) -> None:
        """Undo what an unfinished round has changed beside the parameters. The moments stay each rank's own.

        Periodic tasks may change attached objects: those of the common step are repeated, if they came after it.
        """
        self.exchanges.totals.roll_back()
        if self.round_start.schedule is not None:
            self.state.load_schedule(self.round_start.schedule)
            self.periodic.done_step = self.round_start.periodic_done_step

    def mark_round_start(self, schedule: StateTree | None = None) -> None:
        """Keep the schedule of the common step: that of now, or the one a checkpoint has."""
        if self.outer.commits_by_round:
            self.round_start = RoundStart(schedule or self.state.copy_schedule(), self.periodic.done_step)

    # The world and the exchanges with its ranks.

    def enter_world(self, world: World, step: int, cursor: int) -> None:
        """Continue in another world at `step`; drop the gradients and results of the last one."""
        self.world = world
        self.move_to(step, cursor)
        self.steps = WorldSteps(self.config.train.steps)
        self.drop_gradients()

    def leave_world(self) -> None:
        """Release every reference to the process group of a world that has ended."""
        self.shards.leave_world()
        with suppress(OSError, RuntimeError, ShoalError):
            self.sync.close()
        self.exchanges = no_exchanges(self.model, self.world, self.exchanges.steps)
        self.exchanges.steps.close()
        self.recorder.leave_world()
        self.world = without_group(self.world)

    def leave_at_boundary(self) -> None:
        """Raise `StepBoundary` if all ranks have agreed to leave the generation together.

        Inside a round, wait for its end: the next generation would do the steps of an unfinished round again.
        """
        if self.steps.leaves_at_boundary and self.is_at_common_step:
            raise StepBoundary(f"all ranks stop together after step {self.progress.step}")

    def connect(self) -> None:
        """Make the exchanges with the ranks of this world."""
        self.shards.connect(self.config.sync, self.world)
        if (warning := self.shards.missing_copies(self.world)) is not None and self.world.is_main:
            self.recorder.warn(warning)
        self.exchanges = make_exchanges(self.config, self.state, self.world, self.plan)
        self.shards.use(self.sync)
        self.mark_round_start()

    def set_sync(self, sync: SyncConfig) -> None:
        """Set the sync mode of the exchanges that `connect` makes next."""
        self.config = self.config.model_copy(update={"sync": sync})

    def change_sync(self, sync: SyncConfig) -> None:
        """Replace the exchanges between two steps, when all ranks have done the last one and their models are equal."""
        self.sync.close()
        # Free the old buffers before new ones are allocated: gradients of 124M parameters are 496 MB.
        self.exchanges = no_exchanges(self.model, self.world, self.exchanges.steps)
        gc.collect()
        self.set_sync(sync)
        self.connect()
        self.outer.rewind(self.progress.step, in_flight=0)

    def exchange_after_backward(self) -> None:
        """Exchange gradients after backward from now on, of some parameters or all. All ranks call it in one step."""
        if self.sync.can_leave_out:
            return
        residuals = {name: tensor.clone() for name, tensor in self.sync.state().items()}
        closed, self.exchanges = self.sync, replace(self.exchanges, sync=NoExchange(self.model))
        closed.close()
        sync = make_gradient_sync(self.config.sync, self.model, self.world, after_backward=True)
        sync.load_state(residuals)
        self.exchanges = replace(self.exchanges, sync=sync)

    # The division of the batch.

    def change_plan(self, plan: BatchPlan) -> None:
        """Divide the following batches in another way, between two steps. All ranks call it after the same step."""
        self.division.plan = plan
        self.exchanges.change_plan(self.model, plan, self.weight)

    def restore_shares(self, saved: Shares | None) -> None:
        if saved is not None and self.division.balance.is_on:
            self.change_plan(self.division.as_saved(saved, self.world))

    def settle_micro_batches(self) -> None:
        """Choose the size of micro-batches; see `BatchDivision.with_best_micro_batches`."""
        plan = self.division.with_best_micro_batches(self.world)
        if plan != self.plan:
            self.change_plan(plan)

"""One replica and its training step: fetch, forward, backward, clip, update, record.

Compression, batch shares and outer steps are objects behind interfaces, and a world of one rank is no exception. Other
modules read a trainer's fields; its methods change them, except for the hook `between_steps`.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from shoal.config.schema import Config, SyncConfig
from shoal.cost.batch_plan import BatchPlan, learning_rate, weights_of
from shoal.cost.model_size import grad_bytes
from shoal.data.sampling import Batches, Rows
from shoal.errors import RunFailed, ShoalError
from shoal.model.gpt import GPT
from shoal.sync.compression import kernel_or_plain
from shoal.sync.fence import Fence, OpenFence, StepBoundary
from shoal.sync.gradients import GradientSync, NoExchange, clip_gradients, make_gradient_sync
from shoal.sync.outer import EveryStep, NonFiniteExchange, OuterSync, make_outer_sync
from shoal.sync.replicas import gather_integers
from shoal.sync.step_stats import CommTimes, StepGather, StepStats, StepTimer
from shoal.sync.world import World, set_collective_timeout, without_group
from shoal.train.autotune import ComputeChoice, apply
from shoal.train.checkpoint import Progress
from shoal.train.recorder import Recorder
from shoal.train.stragglers import Stragglers


class StopRequest:
    """Whether this rank was asked to stop; the ranks agree on the step after which all of them do."""

    wanted = False


@dataclass(frozen=True)
class Exchanges:
    """A replica's exchanges with the other ranks."""

    sync: GradientSync  # Sums gradients in every step.
    outer: OuterSync  # Averages parameters at the end of a round of local steps.
    steps: StepGather  # Gathers the loss and the statistics of every step.


def make_exchanges(config: Config, model: GPT, world: World, plan: BatchPlan) -> Exchanges:
    share = plan.share(world.rank)
    outer = make_outer_sync(config.sync, model, world, weight=share / plan.global_batch)
    if config.sync.is_outer:
        sync: GradientSync = NoExchange(model, own_tokens=share * config.model.seq_len)
    else:
        sync = make_gradient_sync(config.sync, model, world, tokens=plan.micro_batch * config.model.seq_len)
    set_collective_timeout(world, exchange_timeout_s(config.sync, outer))
    return Exchanges(sync, outer, StepGather(world, outer.lag_steps))


def exchange_timeout_s(sync: SyncConfig, outer: OuterSync) -> float:
    """Return how long a rank waits for a peer: a rank that may run ahead waits for as many steps of the slowest."""
    return sync.timeout_s * (1 + outer.lag_steps)


@dataclass
class Trainer:
    config: Config  # `config.sync` is the resolved sync mode in use, never `auto`.
    world: World
    model: GPT
    optimizer: AdamW
    exchanges: Exchanges
    batches: Batches
    timer: StepTimer
    recorder: Recorder
    stop: StopRequest
    progress: Progress
    fence: Fence = field(default_factory=OpenFence)  # Decides what this rank may still do in its generation.
    peak_lr: float = 0.0
    largest_micro_batch: int = 1  # The largest micro-batch that there is memory for.
    launched_ranks: int = 0  # Ranks at launch. A rank that joined later has a higher id.
    # The lineages before this launch's first one, and the step after which each was left.
    history: tuple[tuple[str, int], ...] = ()
    # The last step whose periodic tasks (evaluation, checkpoint, comparison) are done, and the last evaluated step.
    # Both must be the same on all ranks, or some would wait in an exchange that the others skip.
    periodic_done_step: int = 0
    evaluated_step: int = -1
    stragglers: Stragglers = field(default_factory=Stragglers)
    compute: ComputeChoice = field(default_factory=ComputeChoice)
    times: dict[str, float] = field(default_factory=dict)  # Seconds of the last step by phase.
    # Called on every rank after a step that another one follows.
    between_steps: Callable[[], None] = field(default=lambda: None)
    # Where the steps began of which this rank does not know the world's loss yet.
    _unsettled: deque[Progress] = field(default_factory=deque)
    _leaves_at_boundary: bool = False  # All ranks have agreed to leave the generation together after a step.
    _nonfinite: StepResult | None = None  # This rank's first result that was not finite.

    def step(self) -> bool:
        """Train on one global batch; return whether any rank is stats to want to stop."""
        self.timer.start()
        step = self.progress.step + 1
        lr = learning_rate(step, self.peak_lr, self.config.train)
        if self.config.model.dropout:
            # A function of rank and step instead of a running generator: resuming is exact without saving its state.
            torch.manual_seed((self.config.train.seed + self.world.rank) * 1_000_003 + step)
        loss_sum, comm = self._forward_backward()
        # The exchange of this step has succeeded: every rank had applied the step before it.
        self._commit()
        result = self._clip(step, loss_sum)
        self.step_gather.begin(
            loss_sum if result.is_finite else math.nan, comm, self.stop.wanted, self.fence.stop_after_step
        )
        self._update(lr, result)
        outer_times = self._outer_step(step)
        self.fence.set_step(self.outer.common_step(step))
        stats = self.step_gather.finish()
        self._split_comm_time("backward", comm, stats[-1].wait_s if comm.wait_s is None else comm.wait_s)
        self._split_comm_time("optimizer", outer_times, outer_times.wait_s or 0.0)
        self.timer.add("wait", self.step_gather.late_s)
        wants_stop = self._settle(stats)
        self._record(step, (comm, outer_times), own_loss=loss_sum / self.own_tokens, lr=lr, grad_norm=result.norm)
        self._warn_of_stragglers(stats)
        return wants_stop

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
    def batch_plan(self) -> BatchPlan:
        return self.batches.shard.plan

    @property
    def global_batch(self) -> int:
        return self.batch_plan.global_batch

    @property
    def global_tokens(self) -> int:
        return self.global_batch * self.config.model.seq_len

    @property
    def own_tokens(self) -> int:
        return self.batch_plan.share(self.world.rank) * self.config.model.seq_len

    def settle(self) -> bool:
        """Wait for the statistics of all steps so far; return whether any rank wants to stop."""
        return self._settle(self.step_gather.drain())

    def unsettled_steps(self) -> list[Progress]:
        """Return where the steps began of which this rank does not know the world's loss."""
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
        self.exchanges = Exchanges(NoExchange(self.model), EveryStep(), self.step_gather)
        self.step_gather.close()
        self.recorder.leave_world()
        self.world = without_group(self.world)

    def enter_world(self, world: World, step: int, cursor: int, launched_ranks: int) -> None:
        """Continue in another world at `step`; drop the gradients and results of the last one."""
        self.world = world
        self.set_launched_ranks(launched_ranks)
        self.move_to(step, cursor)
        self._unsettled.clear()
        self._leaves_at_boundary, self._nonfinite = False, None
        self.optimizer.zero_grad(set_to_none=True)

    def set_launched_ranks(self, launched_ranks: int) -> None:
        """Set the number of ranks at launch, and start to judge stragglers anew."""
        self.launched_ranks = launched_ranks
        self.stragglers.reset(self.world.names, self.world.ids, weights_of(self.config.run, range(launched_ranks)))

    def set_batches(self, batches: Batches, largest_micro_batch: int, peak_lr: float) -> None:
        self.batches, self.largest_micro_batch, self.peak_lr = batches, largest_micro_batch, peak_lr

    def set_sync(self, sync: SyncConfig) -> None:
        """Set the sync mode of the exchanges that `connect` makes next."""
        self.config = self.config.model_copy(update={"sync": sync})

    def connect(self) -> None:
        """Make the exchanges with the ranks of this world."""
        self.exchanges = make_exchanges(self.config, self.model, self.world, self.batch_plan)

    def change_sync(self, sync: SyncConfig) -> None:
        """Replace the exchanges between two steps, when all ranks have done the last one and their models are equal."""
        self.sync.close()
        # Free the old buffers before new ones are allocated: gradients of 124M parameters are 496 MB.
        self.exchanges = Exchanges(NoExchange(self.model), self.outer, self.step_gather)
        gc.collect()
        self.set_sync(sync)
        self.connect()
        self.outer.rewind(self.progress.step, in_flight=0)

    def set_compute(self, choice: ComputeChoice) -> None:
        """Compile the model and set its precision as chosen."""
        self.compute = choice
        apply(choice, self.model)

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

    def restore_periodic(self, done_step: int, evaluated_step: int = -1) -> None:
        self.periodic_done_step, self.evaluated_step = done_step, evaluated_step

    def mark_periodic_done(self, step: int) -> None:
        self.periodic_done_step = step

    def mark_evaluated(self, step: int) -> None:
        self.evaluated_step = step

    def _forward_backward(self) -> tuple[float, CommTimes]:
        scale = self.sync.loss_scale(self.global_tokens)
        loss_sum = 0.0
        remaining = self.batch_plan.micro_batches[self.world.rank]
        for inputs, targets in self._fetch():
            remaining -= 1
            with self.sync.micro_batch(last=remaining == 0):
                with self.timer.phase("forward"):
                    loss = self.sync.module(inputs, targets)
                with self.timer.phase("backward"):
                    (loss * scale).backward()
                    loss_sum += loss.item()
        with self.timer.phase("backward"):
            comm = self.sync.finish()
        return loss_sum, comm

    def _fetch(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.batches.micro_batches(self.progress.cursor)
        while True:
            with self.timer.phase("data"):
                block = next(rows, None)
                pair = None if block is None else split_inputs_targets(block, self.world.device)
            if pair is None:
                return
            yield pair

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

    def _clip(self, step: int, loss_sum: float) -> StepResult:
        with self.timer.phase("optimizer"):
            norm = clip_gradients(self.model.parameters(), self.config.train.clip)
        return StepResult(step, loss_sum, norm, self.batches.shard.positions(self.progress.cursor))

    def _update(self, lr: float, result: StepResult) -> None:
        """Apply the step, unless its result is not finite.

        Where gradients are summed every rank has the same norm, so all refuse the step here. In the other modes the
        peers learn of it later: until then this rank continues without updates, so what it sends stays finite.
        """
        if not result.is_finite:
            self._nonfinite = self._nonfinite or result
        if not math.isfinite(result.norm) and not self.outer.replicas_differ:
            self._refuse_step()
        with self.timer.phase("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self.fence.apply_step(self.outer.common_step(result.step)):
                if self._nonfinite is None:
                    self.optimizer.step()
                self._unsettled.append(self.progress)
                self.move_to(result.step, self.progress.cursor + self.global_batch)
            self.optimizer.zero_grad(set_to_none=True)

    def _outer_step(self, step: int) -> CommTimes:
        with self.timer.phase("optimizer"):
            try:
                return self.outer.after_inner_step(step, last=step == self.config.train.steps)
            except NonFiniteExchange:
                self._refuse_step()
                raise

    def _split_comm_time(self, phase: str, comm: CommTimes, wait_s: float) -> None:
        """Move the communication at the end of a phase to `wait` (for a peer) and `exposed` (the network)."""
        wait_s = min(max(wait_s, 0.0), comm.tail_s)
        self.timer.move(phase, "wait", wait_s)
        self.timer.move(phase, "exposed", comm.tail_s - wait_s)

    def _settle(self, known: list[StepStats]) -> bool:
        """Propose the steps whose statistics have arrived from all ranks for the next commit."""
        for stats in known:
            began = self._unsettled.popleft()
            loss = stats.loss_sum / self.global_tokens
            if not math.isfinite(loss):
                self._refuse_step()
            self.recorder.propose(began.step + 1, began.cursor, began.cursor + self.global_batch, loss)
            self._leaves_at_boundary |= stats.stop_after_step
        return any(stats.stop for stats in known)

    def _record(self, step: int, exchanges: tuple[CommTimes, ...], **fields: float) -> None:
        self.times = self.timer.finish()
        for name, seconds in (
            ("allreduce", [comm.allreduce_s for comm in exchanges if comm.allreduce_s is not None]),
            ("hidden", [comm.hidden_s for comm in exchanges if comm.hidden_s is not None]),
        ):
            if seconds:
                self.times[name] = sum(seconds)
        self.recorder.step(step, self.times, tokens=self.global_tokens, **fields)

    def _warn_of_stragglers(self, known: list[StepStats]) -> None:
        """Judge on all ranks and warn on the first: when that rank leaves, the next one repeats no warning."""
        work, exposed_s = self.batch_plan.micro_batches, self.times.get("exposed", 0.0)
        for stats in known:
            for slow in self.stragglers.observe(stats.by_rank, work, self.times["step"], exposed_s):
                if self.world.is_main:
                    self.recorder.warn(slow, step=self.progress.step)

    def _refuse_step(self) -> None:
        """Raise the error that names the culprits; all ranks get here in the same step and can still exchange."""
        error = explain_refusal(self.world, self._nonfinite, self.model.parameters(), self.config.train.lr)
        if error is not None:
            raise error


def split_inputs_targets(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs, and targets: the same tokens shifted by one."""
    block = torch.from_numpy(rows).to(device)
    return block[:, :-1], block[:, 1:]


def describe_exchanges(trainer: Trainer) -> dict[str, object]:
    """Return the fields of `start` and `choice` events about the exchanges."""
    sync = trainer.config.sync
    return {
        "sync": sync.mode,
        "wire": sync.wire,
        "grad_bytes": grad_bytes(shapes_of(trainer.model), sync.wire) + trainer.sync.extra_bytes,
        "round_steps": trainer.outer.round_steps,
        "wire_made_by": kernel_or_plain(sync.wire),
        "inside": trainer.sync.inside.way,
        "inside_note": trainer.sync.inside.note,
    }


def shapes_of(model: GPT) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in model.parameters())


# A step whose loss or gradient is not finite: no rank applies or commits it, and the error names the rank at fault.
# Ranks exchange whole numbers: the index of a value in these.
_FINITE = "finite"
_VALUE_KINDS = (_FINITE, "nan", "inf", "-inf")


@dataclass(frozen=True)
class StepResult:
    """One rank's part of a step."""

    step: int
    loss: float
    norm: float
    samples: tuple[int, int]  # Positions of its samples in the global order, `[first, end)`.

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class RefusedStep:
    """One rank's first result that was not finite, as sent to all ranks. `loss` and `norm` are value kinds."""

    id: int
    step: int
    loss: str
    norm: str
    samples: tuple[int, int]
    has_bad_weights: bool = False


def explain_refusal(world: World, own: StepResult | None, weights: Iterable[Tensor], lr: float) -> RunFailed | None:
    """Gather the first non-finite result of every rank; return the same error on all, or None if no rank has any."""
    has_bad_weights = not all(bool(weight.isfinite().all()) for weight in weights)
    numbers = [0] * 6
    if own is not None:
        kinds = [0 if math.isfinite(value) else _VALUE_KINDS.index(str(value)) for value in (own.loss, own.norm)]
        numbers = [own.step, *kinds, *own.samples, has_bad_weights]
    refused = [
        RefusedStep(world.ids[rank], step, _VALUE_KINDS[loss], _VALUE_KINDS[norm], (first, end), bool(is_bad))
        for rank, (step, loss, norm, first, end, is_bad) in enumerate(gather_integers(world, numbers))
        if step
    ]
    return explain(refused, world.size, lr) if refused else None


def explain(refused: Sequence[RefusedStep], ranks: int, lr: float) -> RunFailed:
    """Explain the first refused step.

    Look at norms only if every loss was finite: one bad loss spoils the sum of all gradients.
    """
    step = min(rank.step for rank in refused)
    first = [rank for rank in refused if rank.step == step]
    lower_lr = f"start a new run with a lower rate: --set train.lr={lr / 3:.2g}"
    what, culprits = "loss", [(rank, rank.loss) for rank in first if rank.loss != _FINITE]
    if not culprits:
        what, culprits = "gradient norm", [(rank, rank.norm) for rank in first]
        lower_lr += ", or use --wire fp32 if a shorter format was used"
        # A sum of gradients does not tell which rank spoiled it; weights that differ do.
        bad_weights = [str(rank.id) for rank in refused if rank.has_bad_weights]
        if 0 < len(bad_weights) < ranks:
            return RunFailed(
                f"the gradient norm was not finite in step {step}: weights of rank {' and '.join(bad_weights)} are not "
                "finite either, and those of the others are; no rank has applied or committed the step",
                why="the memory or the processor of that machine is at fault",
                fix="test its memory (memtester 1G 1), then resume from the last checkpoint: shoal train --resume RUN",
            )
    if len(culprits) == ranks:
        return RunFailed(
            f"the {what} became {culprits[0][1]} in step {step}{' on every rank' if ranks > 1 else ''}",
            why="the training diverged, most often because the learning rate is too high",
            fix=lower_lr,
        )
    named = " and ".join(
        f"that of rank {rank.id} on samples {rank.samples[0]} to {rank.samples[1] - 1} became {value}"
        for rank, value in culprits
    )
    return RunFailed(
        f"a {what} was not finite in step {step}: {named}; no rank has applied or committed the step",
        why="the values of all other ranks were finite: these samples, or that machine's computation, are at fault",
        fix=f"resume from the last checkpoint: shoal train --resume RUN. If the same samples fail again, {lower_lr}",
    )

"""One training step: begin, backward of micro-batches, exchange, clip, apply, record. It reads from top to bottom.

The step knows a replica and a number of samples. What a sample is, and how a loss is made of it, is known to the
program that drives it: `engine.session` for a user's loop, and by it shoal's own GPT.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.loss_terms import LossTerms
from shoal.engine.misuse import LoopGuard
from shoal.engine.parts import PartUpdates, parameters_of
from shoal.engine.refusal import StepResult, explain_refusal
from shoal.engine.replica import Replica
from shoal.engine.sharded_state import WaitingUpdate
from shoal.engine.update import StepNumbers, can_decide_on_gpu, clip_gradients, set_found_inf, update_if_finite
from shoal.errors import UsageError
from shoal.host.node_stats import NodeStats, NodeWatch
from shoal.sync.gather import GatheredRows, gather_rows
from shoal.sync.outer import NonFiniteExchange
from shoal.sync.step_stats import CommTimes, OwnTimes, StepStats, StepTimer, StopKind
from shoal.units import join_words

# Between the seeds of neighbouring ranks: more than a training has steps.
_SEED_STRIDE = 1_000_003


class UnequalMicroBatches(Exception):
    """A step needs as many micro-batches on every rank: it is repeated with another division. All ranks raise it."""


class StopRequest:
    """Whether this rank was asked to end the training; the ranks agree on the step after which all of them do."""

    wanted = False
    is_complete = False  # The training needs no more steps.


@dataclass
class StepWork:
    """What this rank has done of a step so far."""

    micro_batches: int = 0
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    terms: int = 0  # Terms of the loss: samples, or what the program counts instead, such as tokens.
    has_scaled: bool = False  # The attached scaler has scaled a loss.
    backward_ended: float = 0.0  # When the last micro-batch had its backward.


@dataclass(frozen=True)
class DoneStep:
    """A step that this rank has done. Empty where none was done since the replica entered its world."""

    stats: Sequence[StepStats] = ()  # Of the steps whose statistics have arrived from all ranks by now.
    times: dict[str, float] = field(default_factory=dict)  # Seconds of this rank by phase.
    wants_stop: bool = False  # A rank is known to want to stop.
    loss: float = math.nan  # The newest loss that is known: of all ranks, or in the first steps this rank's own.
    norm: float = math.nan  # Of the gradients, before clipping.


class TrainingStep:
    """Does the steps of a replica, one after the other."""

    def __init__(
        self,
        replica: Replica,
        timer: StepTimer,
        stop: StopRequest,
        watch: NodeWatch | None = None,
        seeds: bool = True,
        lower_rate_advice: str = "",
    ) -> None:
        self._replica = replica
        self.timer = timer
        self._stop = stop
        self._watch = watch  # Samples this machine beside training.
        # Whether torch's random numbers follow from seed, rank and step, so that a repeated step is the same.
        self._seeds = seeds
        # The advice in the error about a training that diverges.
        self._lower_rate_advice = lower_rate_advice or "train with a lower learning rate"
        self.guard = LoopGuard(replica.state)
        self.parts = PartUpdates(replica, self.guard.session_at_work)
        self._terms = LossTerms(replica)
        self._work = StepWork()
        self._disk_s = 0.0  # This rank wrote checkpoints for so long since its last step.
        self._has_checked_gradients = False  # Every parameter had a gradient in the first step.

    # A step, in the order of the calls.

    def begin(self) -> None:
        """Begin the next step, or the same one again after a lost peer: from the same state either way."""
        replica = self._replica
        if replica.recorder.profiler is not None:
            replica.recorder.profiler.before_step(replica.progress.step + 1)
        self.timer.start()
        self.guard.begin_step()
        self.parts.begin_step()
        self._work = StepWork()
        replica.shards.begin_step()
        if self._seeds:
            # A function of rank and step instead of a running generator: resuming is exact without saving its state.
            seed = replica.config.train.seed + replica.world.rank
            seed_generators(seed * _SEED_STRIDE + replica.progress.step + 1)
        replica.exchanges.totals.remember()

    def backward(self, loss: Tensor, terms: int | None = None) -> None:
        """Add the gradients of a micro-batch. `loss` is a sum of `terms` terms: by default one for each sample."""
        replica, work = self._replica, self._work
        sizes = replica.plan.sizes(replica.world.rank)
        if work.micro_batches == len(sizes):
            raise self._too_many_backwards(len(sizes))
        samples = sizes[work.micro_batches]
        work.micro_batches += 1
        work.terms += samples if terms is None else terms
        is_last, expected = work.micro_batches == len(sizes), self._terms.samples
        if not self.parts.current:
            self._terms.learn(terms, samples)
            expected = self._terms.expected
            if is_last:
                self._terms.start(work.terms)
        with self.timer.phase("backward"), self.guard.session_at_work():
            scaled = loss * replica.sync.loss_scale(expected)
            if replica.scaler is not None:
                scaled, work.has_scaled = replica.scaler.scale(scaled), True
            replica.sync.backward(scaled, is_last)
            # A new tensor, on the device of the loss.
            work.loss_sum = loss.detach().double() + work.loss_sum
        work.backward_ended = time.perf_counter()

    def gather(self, tensor: Tensor) -> GatheredRows:
        """Return the rows of the same micro-batch of all ranks."""
        plan, world, number = self._replica.plan, self._replica.world, self._work.micro_batches
        if len(set(plan.counts)) > 1:
            raise UnequalMicroBatches(
                f"the ranks have {join_words([str(count) for count in plan.counts])} micro-batches"
            )
        if number == plan.counts[world.rank]:
            raise UsageError(
                "step.gather was called after the last backward of the step",
                why="it brings together the rows of one micro-batch of every rank, before their backward",
                fix="call it inside the loop over step.batches(…), before step.backward",
            )
        samples = [plan.sizes(rank)[number] for rank in range(world.size)]
        rows = len(tensor) if tensor.dim() else 0
        per_sample, rest = divmod(rows, samples[world.rank])
        if rest or not per_sample:
            raise UsageError(
                f"step.gather got {rows} rows of {samples[world.rank]} samples",
                why="every sample of the micro-batch has the same number of rows",
                fix="gather a tensor with a row for each sample, as the model's output has",
            )
        # Where replicas train alone, each rank's loss is divided by its own share.
        divided_by = self._replica.share if self._replica.outer.replicas_differ else 1
        return gather_rows(world, tensor, [per_sample * count for count in samples], divided_by)

    def begin_part(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin an update of these optimizers inside the step."""
        if self.parts.current:
            raise UsageError(
                f"step {self._replica.progress.step + 1}: a part began inside another part",
                why="each part ends with an update of its own, one after the other",
                fix="put them below each other, or name both optimizers: with step.part(first, second): …",
            )
        if self._work.micro_batches:
            raise UsageError(
                f"step {self._replica.progress.step + 1}: a part began after a backward outside of it",
                why="a part has micro-batches of its own; those of the last update come after all parts",
                fix="begin the parts first: with step.part(optimizer): …, then backward and step.update()",
            )
        sync = self._replica.config.sync
        if sync.is_sharded:
            raise UsageError(
                f"sync.mode={sync.mode} cannot update a part of the step's optimizers",
                why="it divides one update of all parameters among the ranks, and step.part makes several in a step",
                fix="use --sync ddp, or one update for all optimizers: step.update() without step.part",
            )
        self.parts.begin(optimizers)
        self._replica.exchange_after_backward()

    def update_part(self, clip: float | None = None) -> None:
        """Exchange, clip and apply the gradients of the present part."""
        replica, step = self._replica, self._replica.progress.step + 1
        self.guard.check_gradients_kept(step)
        self._check_complete(step)
        parameters = parameters_of(self.parts.current)
        comm = self._finish_exchange(parameters)
        self._split_comm_time("backward", comm, comm.wait_s or 0.0)
        self.parts.exchange_s += comm.tail_s
        self._terms.finish_part(self._work.terms)
        result, _ = self._finish_gradients(step, clip, self.parts.current, None, can_queue=False)
        self._judge(result, is_part=True)
        with self.timer.phase("optimizer"):
            self.parts.end()
            # Also those of other parameters, which the loss has reached on its way.
            replica.drop_gradients()
        self.guard.begin_step()
        self._work = StepWork()

    def update(
        self,
        clip: float | None = None,
        after: Callable[[], object] | None = None,
        make_fields: Callable[[], dict[str, Any]] = dict,
        only: Sequence[Optimizer] | None = None,
    ) -> DoneStep:
        """Exchange, clip, apply and record the step.

        `after` is called with the update: both happen, or none. `make_fields` returns more fields of the step's event.
        `only` some of the optimizers are updated; otherwise all that no part of the step has updated.
        """
        replica, step = self._replica, self._replica.progress.step + 1
        optimizers = self.parts.rest(only)
        chosen = None if len(optimizers) == len(replica.state.optimizers) else parameters_of(optimizers)
        if replica.shards.keeps_gradients:
            self.guard.check_gradients_kept(step)
        self._check_complete(step, chosen)
        comm = self._finish_exchange(chosen)
        # The exchange of this step has succeeded: every rank had applied the step before it.
        replica.commit_done_steps()
        total_terms = self._terms.finish(self._work.terms)
        waiting = self._describe_update(step, clip, optimizers, after, total_terms)
        result, is_queued = self._finish_gradients(step, clip, optimizers, waiting, can_queue=after is None)
        self._send_statistics(result, comm, total_terms)
        self._judge(result, is_queued)
        if not is_queued:
            self._apply(result, optimizers, after)
        outer_times = self._outer_step(step)
        if replica.shards and after is not None:
            self._call_with_weights(step)
        replica.fence.set_step(replica.outer.common_step(step))
        try:
            stats = replica.exchanges.steps.finish()
        except Exception:
            # A peer was lost after the step was applied: the next generation continues from it.
            self._record(step, comm, outer_times, loss=result.loss, grad_norm=result.norm, **make_fields())
            raise
        self._split_comm_time("backward", comm, stats[-1].wait_s if comm.wait_s is None else comm.wait_s)
        self._split_comm_time("optimizer", outer_times, outer_times.wait_s or 0.0)
        for phase, waited_s in replica.shards.take_waited_s().items():
            self.timer.move(phase, "exposed", waited_s)
        self.timer.add("wait", replica.exchanges.steps.late_s)
        wants_stop = self._settle(stats)
        times = self._record(step, comm, outer_times, loss=result.loss, grad_norm=result.norm, **make_fields())
        return DoneStep(stats, times, wants_stop, stats[-1].loss_sum if stats else result.loss, result.norm)

    def drop(self) -> None:
        """Undo what a step that is not finished has changed: gradients, buffers, what a scaler knows of them, and the
        updates of its parts."""
        replica, scaler = self._replica, self._replica.scaler
        replica.exchanges.totals.restore()
        self.parts.undo()
        replica.drop_gradients()
        if scaler is not None and self._work.has_scaled:
            # With its own scale: that only forgets that gradients were unscaled, which it refuses to do twice.
            with self.guard.session_at_work():
                scaler.update(scaler.get_scale())

    @property
    def unchecked_samples(self) -> int | None:
        """The samples of the next micro-batch in the first step of this process, whose loss is looked at; else None."""
        sizes, done = self._replica.plan.sizes(self._replica.world.rank), self._work.micro_batches
        return None if self._has_checked_gradients or done == len(sizes) else sizes[done]

    def divide_for_gather(self) -> None:
        """Let every rank compute its share at once: rows are gathered from one micro-batch of each."""
        replica = self._replica
        if replica.config.train.micro_batch is not None:
            counts = join_words([str(count) for count in replica.plan.counts])
            raise UsageError(
                f"the ranks have different numbers of micro-batches: {counts}",
                why="step.gather needs as many on every rank, and train.micro_batch keeps a share from being computed "
                "at once",
                fix='leave micro_batch out, or keep the shares equal: settings={"run.balance": "off"}',
            )
        replica.change_plan(replica.division.at_once())

    def settle(self) -> bool:
        """Wait for the statistics of all steps so far; return whether any rank wants to stop."""
        return self._settle(self._replica.exchanges.steps.drain())

    def add_disk_time(self, seconds: float) -> None:
        """Note that this rank wrote to its disk for so long since its last step."""
        self._disk_s += seconds

    # The parts of a step.

    def _check_complete(self, step: int, only: Collection[Tensor] | None = None) -> None:
        """Refuse an update that would leave out samples or parameters, also on one rank."""
        replica, done = self._replica, self._work.micro_batches
        count = replica.plan.counts[replica.world.rank]
        if done < count:
            raise UsageError(
                f"step {step} was updated after {done} of its {count} micro-batches on this rank",
                why="every sample of the global batch belongs to the step, and the other ranks wait for these",
                fix="call step.backward for every batch of step.batches(...), and step.update after the last one",
            )
        if not self._has_checked_gradients and not self.parts.current:
            # Some exchanges would fill in zeros, others wait forever.
            if not replica.config.train.unused_parameters:
                replica.shards.check_gradients(only if self.parts.updated else None)
            self._has_checked_gradients = True

    def _too_many_backwards(self, count: int) -> UsageError:
        return UsageError(
            f"step {self._replica.progress.step + 1} has {count} micro-batches on this rank, and backward was called "
            "again",
            why="each micro-batch has one backward: gradients travel with the last one",
            fix="add the losses of a micro-batch, and call step.backward once for each batch of step.batches(dataset)",
        )

    def _finish_exchange(self, only: Collection[Tensor] | None) -> CommTimes:
        with self.timer.phase("backward"):
            # What the program did since its last backward is its own work, not a part of the exchange. Read inside the
            # phase, so that the exchange is never longer than it.
            between_s = time.perf_counter() - self._work.backward_ended
            comm = self._replica.sync.finish(only)
        return replace(comm, tail_s=max(0.0, comm.tail_s - between_s))

    def _describe_update(
        self,
        step: int,
        clip: float | None,
        optimizers: Sequence[Optimizer],
        after: Callable[[], object] | None,
        total_terms: int,
    ) -> WaitingUpdate | None:
        """Return what this rank needs to finish the step without its peers; None where nothing is divided."""
        state, work = self._replica.state, self._work
        if state.divided is None:
            return None
        # A loss is made a part of the world's by a factor.
        factor = self._terms.own_part(1.0, work.terms, total_terms) / max(1, work.terms)
        buffers = [buffer.clone() for buffer in state.buffers().values()]
        return WaitingUpdate(step, clip, optimizers, buffers, work.loss_sum, factor, after)

    def _finish_gradients(
        self,
        step: int,
        clip: float | None,
        optimizers: Sequence[Optimizer],
        waiting: WaitingUpdate | None,
        can_queue: bool,
    ) -> tuple[StepResult, bool]:
        """Clip the gradients; return the step's loss and norm, for which a GPU is waited for once.

        Another rank may apply the step as soon as this one has sent its part of the norm: `waiting` is then what this
        rank has left to do. Return also whether the update is in the GPU's queue already, under the condition that both
        are finite.
        """
        replica, work = self._replica, self._work
        first = replica.progress.cursor + replica.plan.offset(replica.world.rank)
        own_samples = (first, first + replica.share)
        can_queue = can_queue and self._can_queue_update
        parameters = replica.state.updated_by(optimizers)
        with self.timer.phase("optimizer"), self.guard.session_at_work():
            if replica.scaler is not None:
                with replica.state.updating():
                    for optimizer in optimizers:
                        replica.scaler.unscale_(optimizer)
            replica.shards.await_update(waiting)
            norm = replica.shards.gradient_norm(parameters)
            numbers = StepNumbers(work.loss_sum, norm)
            if can_queue:
                with replica.fence.apply_step(replica.outer.common_step(step)):
                    update_if_finite(optimizers, work.loss_sum, norm, clip)
                    replica.advance(step)
                replica.drop_gradients()
            loss_sum, norm_value = numbers.read()
            if replica.shards and replica.scaler is not None:
                # Each rank has looked at its own part.
                set_found_inf(replica.scaler, optimizers, not math.isfinite(norm_value))
            if not can_queue:
                clip_gradients(parameters, norm_value, math.inf if clip is None else clip)
                if waiting is not None:
                    waiting.is_clipped = True
        return StepResult(step, loss_sum / max(1, work.terms), norm_value, own_samples), can_queue

    @property
    def _can_queue_update(self) -> bool:
        """Whether the GPU can decide on the update.

        Not where a lost peer can leave half a sum in the GPU's memory (NCCL), and not beside ranks that clip on a
        processor, with other bits.
        """
        replica, world = self._replica, self._replica.world
        can_wait = world.device.type == "cuda" and world.gpu_group is None and "cpu" not in world.devices
        can_wait &= not replica.shards
        is_sound = replica.scaler is None and replica.steps.nonfinite is None
        return can_wait and is_sound and can_decide_on_gpu(replica.state.optimizers)

    def _send_statistics(self, result: StepResult, comm: CommTimes, total_terms: int) -> None:
        """Send this rank's part of the loss and its times to all ranks, beside what follows."""
        replica, watch = self._replica, self._watch
        # Of a part of the step that was not finite, the others do not know yet.
        is_valid = (result.is_finite or replica.scaler is not None) and replica.steps.nonfinite is None
        loss = self._terms.own_part(result.loss, self._work.terms, total_terms) if is_valid else math.nan
        gc_s = 0.0 if watch is None else watch.take_gc_s()
        own_times = OwnTimes(self.timer.seconds.get("data", 0.0), gc_s, self._disk_s)
        self._disk_s = 0.0
        node = NodeStats() if watch is None else watch.recent()
        # Not up to now: the exchange may have waited for a slower rank.
        work_s = comm.ready_at - self.timer.began - self.parts.exchange_s
        replica.exchanges.steps.add_wait(self.parts.exchange_s)
        replica.exchanges.steps.begin(
            loss,
            comm,
            StopKind.of(self._stop.wanted, self._stop.is_complete),
            replica.fence.stop_after_step,
            work_s,
            own_times,
            node,
        )

    def _judge(self, result: StepResult, is_queued: bool = False, is_part: bool = False) -> None:
        """Remember a result that is not finite, and refuse the step if all ranks know of it.

        Where gradients are summed every rank has the same norm, so all refuse the step here. In the other modes the
        peers learn of it later: until then this rank continues without updates, so what it sends stays finite.
        """
        replica = self._replica
        # A grad scaler tries scales that are too large on purpose, and leaves such a step out.
        is_expected = replica.scaler is not None and math.isfinite(result.loss)
        if not result.is_finite and not is_expected:
            replica.steps.nonfinite = replica.steps.nonfinite or result
        # With a scaler only this rank knows whether its loss was finite: the statistics of the step follow.
        is_known = not (is_part and replica.scaler is not None) and not replica.outer.replicas_differ
        if not math.isfinite(result.norm) and not is_expected and is_known:
            if is_queued:
                # The GPU has left the update out: this is still the state before the step.
                began = replica.steps.unsettled.pop().began
                replica.move_to(began.step, began.cursor)
                replica.fence.set_step(began.step)
            self._refuse()

    def _apply(self, result: StepResult, optimizers: Sequence[Optimizer], after: Callable[[], object] | None) -> None:
        """Apply the step, unless a result was not finite."""
        replica, scaler, step = self._replica, self._replica.scaler, result.step
        with self.timer.phase("optimizer"):
            with replica.fence.apply_step(replica.outer.common_step(step)), self.guard.session_at_work():
                if replica.steps.nonfinite is None:
                    with replica.state.updating():
                        for optimizer in optimizers:
                            optimizer.step() if scaler is None else scaler.step(optimizer)
                    if scaler is not None:
                        scaler.update()
                if not replica.shards:
                    replica.advance(step, after)
                else:
                    # Not before all weights have arrived; not of a step that will be refused.
                    replica.advance(step)
                    replica.shards.note_update(result.norm, after if replica.steps.nonfinite is None else None)
            replica.drop_gradients()

    def _call_with_weights(self, step: int) -> None:
        """Call what goes with an update of a divided model, when all of its weights have arrived."""
        replica = self._replica
        with replica.outer.common(), replica.fence.apply_step(step), self.guard.session_at_work():
            replica.shards.call_after()

    def _outer_step(self, step: int) -> CommTimes:
        """Average parameters, at the end of a round of local steps."""
        replica, outer = self._replica, self._replica.outer
        with self.timer.phase("optimizer"):
            try:
                times = outer.after_inner_step(step, last=step == replica.steps.last_step)
            except NonFiniteExchange:
                self._refuse()
                raise
            if outer.common_step(step) == step:
                replica.mark_round_start()
            # Streaming replicas always differ: their buffers are averaged once in a round.
            is_round_end = not outer.differs_now or step % outer.round_steps == 0
            if outer.replicas_differ and is_round_end:
                replica.exchanges.totals.average_buffers()
            return times

    def _split_comm_time(self, phase: str, comm: CommTimes, wait_s: float) -> None:
        """Move the communication at the end of a phase to `wait` (for a peer) and `exposed` (the network)."""
        wait_s = min(max(wait_s, 0.0), comm.tail_s)
        self.timer.move(phase, "wait", wait_s)
        self.timer.move(phase, "exposed", comm.tail_s - wait_s)

    def _settle(self, known: list[StepStats]) -> bool:
        """Propose the steps whose statistics have arrived from all ranks for the next commit."""
        replica = self._replica
        for stats in known:
            began, plan = replica.steps.unsettled.popleft()
            if not math.isfinite(stats.loss_sum):
                self._refuse()
            replica.recorder.propose(began.step + 1, began.cursor, plan, stats.loss_sum)
            replica.steps.leaves_at_boundary |= stats.stop_after_step
        if any(stats.stop is StopKind.COMPLETE for stats in known):
            # Ranks that have learned of it say so again in the next generation.
            self._stop.is_complete = True
            # Where replicas differ, the next step makes them equal.
            soon = replica.progress.step + replica.outer.replicas_differ
            replica.steps.last_step = min(replica.steps.last_step, soon)
        return any(stats.stop is StopKind.PAUSE for stats in known)

    def _record(
        self, step: int, comm: CommTimes, outer_times: CommTimes, loss: float, **fields: Any
    ) -> dict[str, float]:
        """Record the step; return its seconds by phase."""
        times, exchanges = self.timer.finish(), (comm, outer_times)
        if (exchanged_s := self._exchanged_s(comm, outer_times)) is not None:
            fields["exchanged_s"] = round(exchanged_s, 7)
        for name, seconds in (
            ("allreduce", [part.allreduce_s for part in exchanges if part.allreduce_s is not None]),
            ("hidden", [part.hidden_s for part in exchanges if part.hidden_s is not None]),
        ):
            if seconds:
                times[name] = sum(seconds)
        self._replica.recorder.step(step, times, own_loss=loss, samples=self._replica.global_batch, **fields)
        return times

    def _exchanged_s(self, comm: CommTimes, outer_times: CommTimes) -> float | None:
        """Return the time from the step's begin to the end of the exchange that all ranks left together; None if there
        was none. `shoal trace` puts the clocks of all nodes on one axis by it."""
        replica = self._replica
        if replica.world.size < 2 or replica.outer.differs_now:
            return None
        times = outer_times if replica.outer.replicas_differ else comm
        return times.ready_at + times.tail_s - self.timer.began if times.ready_at else None

    def _refuse(self) -> None:
        """Raise the error that names the culprits, if any rank has one. All ranks get here in the same step, and can
        still exchange."""
        replica = self._replica
        error = explain_refusal(
            replica.world, replica.steps.nonfinite, replica.state.all_parameters, self._lower_rate_advice
        )
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
    step of shoal's small GPT takes up to 1.4 times as long (docs/measurements.md).
    """
    was_set = bool(torch.full((), 1e-40) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)

"""One replica and its step: fetch, forward, backward, clip, update, record.

Timing, wire format, shares and outer steps arrive as objects: the step has no feature branches, and a world of one is
no exception.
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
from shoal.sync.compression import made_by
from shoal.sync.fence import Fence, OpenFence, StepBoundary
from shoal.sync.gradients import GradientSync, NoExchange, clip, make_gradient_sync
from shoal.sync.outer import EveryStep, NotFinite, OuterSync, make_outer
from shoal.sync.replicas import gather
from shoal.sync.step_stats import CommTimes, StepGather, StepStats, StepTimer
from shoal.sync.world import World, bear_with, without_group
from shoal.train.autotune import ComputeChoice
from shoal.train.checkpoint import Progress
from shoal.train.recorder import Recorder
from shoal.train.stragglers import Stragglers

# SECTION train/refusal
# A step whose loss or gradient is no number: nobody applies it, nobody commits it, and all say whose it was.


# Ranks tell each other whole numbers: which of these a loss or a norm is.
_FINITE = "finite"
_KINDS = (_FINITE, "nan", "inf", "-inf")


@dataclass(frozen=True)
class StepResult:
    """What one rank's part of a step came to. `samples` are its positions in the order of the data, `[first, end)`."""

    step: int
    loss: float
    norm: float
    samples: tuple[int, int]

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class RefusedStep:
    """One rank's first outcome that was no number, as everybody knows it. `broken`: its weights are none either."""

    id: int
    step: int
    loss: str
    norm: str
    samples: tuple[int, int]
    broken: bool = False


def refuse(world: World, own: StepResult | None, weights: Iterable[Tensor], lr: float) -> RunFailed | None:
    """On all ranks, once all know that somebody's outcome was no number; the same error everywhere. `own` is this
    rank's first that was none, if any. None when nobody has any."""
    broken = not all(bool(weight.isfinite().all()) for weight in weights)
    numbers = [own.step, _kind(own.loss), _kind(own.norm), *own.samples, broken] if own is not None else [0] * 6
    told = [
        RefusedStep(world.ids[rank], step, _KINDS[loss], _KINDS[norm], (first, end), bool(broken))
        for rank, (step, loss, norm, first, end, broken) in enumerate(gather(world, numbers))
        if step
    ]
    return explain(told, world.size, lr) if told else None


def explain(told: Sequence[RefusedStep], ranks: int, lr: float) -> RunFailed:
    """By the first step that had such an outcome; a norm is only looked at where every loss was a number, since one bad
    loss spoils the sum of all gradients."""
    step = min(rank.step for rank in told)
    bad = [rank for rank in told if rank.step == step]
    lower = f"start a new run with a lower rate: --set train.lr={lr / 3:.2g}"
    what, culprits = "loss", [(rank, rank.loss) for rank in bad if rank.loss != _FINITE]
    if not culprits:
        what, culprits = "gradient norm", [(rank, rank.norm) for rank in bad]
        lower += ", or use --wire fp32 if a shorter format was used"
        if 0 < len(broken := [rank.id for rank in told if rank.broken]) < ranks:
            return _broken(broken, step)
    if len(culprits) == ranks:
        return RunFailed(
            f"the {what} became {culprits[0][1]} in step {step}{' on every rank' if ranks > 1 else ''}",
            why="the training diverged, most often because the learning rate is too high",
            fix=lower,
        )
    named = " and ".join(f"that of rank {rank.id} on {_span(rank)} became {value}" for rank, value in culprits)
    return RunFailed(
        f"a {what} was no number in step {step}: {named}; no rank has applied or committed the step",
        why="all other ranks had numbers: these samples, or what that machine computes, are at fault",
        fix=f"go on from the last checkpoint: shoal train --resume RUN. If the same samples do it again, {lower}",
    )


def _broken(ids: Sequence[int], step: int) -> RunFailed:
    """A sum of gradients does not say whose was none; weights that differ do."""
    named = " and ".join(map(str, ids))
    return RunFailed(
        f"the gradient norm was no number in step {step}: weights of rank {named} are none either, and those of the "
        "others are; no rank has applied or committed the step",
        why="what that machine keeps in memory, or computes, is at fault",
        fix="test its memory (memtester 1G 1), then go on from the last checkpoint: shoal train --resume RUN",
    )


def _span(rank: RefusedStep) -> str:
    first, end = rank.samples
    return f"samples {first} to {end - 1}"


def _kind(value: float) -> int:
    return 0 if math.isfinite(value) else _KINDS.index(str(value))


class StopRequest:
    """Somebody asked this rank to stop; the ranks agree on the step at which all of them do."""

    wanted = False


@dataclass
class Trainer:
    """`config.sync` is what is done, with nothing left to choose; `times` are those of the last step;
    `between_steps` is called on every rank when another one follows. `fence` says what may still be done in this
    generation; `history` are the lineages before this launch's first one. What is due between steps was done up to
    `tended_step`, and the last evaluation was of `evaluated_step`: all ranks must know the same of both. There is
    memory for `largest_micro_batch`."""

    config: Config
    world: World
    model: GPT
    optimizer: AdamW
    sync: GradientSync
    outer: OuterSync
    exchange: StepGather
    batches: Batches
    timer: StepTimer
    recorder: Recorder
    stop: StopRequest
    peak_lr: float
    progress: Progress
    fence: Fence = field(default_factory=OpenFence)
    history: tuple[tuple[str, int], ...] = ()
    tended_step: int = 0
    evaluated_step: int = -1
    largest_micro_batch: int = 1
    # How many ranks the launch had; a rank that joined later has a higher id.
    launched: int = 0
    stragglers: Stragglers = field(default_factory=Stragglers)
    compute: ComputeChoice = field(default_factory=ComputeChoice)
    times: dict[str, float] = field(default_factory=dict)
    between_steps: Callable[[], None] = field(default=lambda: None)
    _begun: deque[Progress] = field(default_factory=deque)
    _edge: bool = False
    _unsound: StepResult | None = None

    def step(self) -> bool:
        """Trains one global batch; whether anybody in the world is known to want to stop."""
        self.timer.start()
        step = self.progress.step + 1
        lr = learning_rate(step, self.peak_lr, self.config.train)
        self._seed_dropout(step)
        loss_sum, comm = self._forward_backward()
        self._commit()
        own = self._outcome(step, loss_sum)
        self.exchange.begin(loss_sum if own.is_sound else math.nan, comm, self.stop.wanted, self.fence.edge)
        self._update(lr, own)
        outer = self._outer_step(step)
        self.fence.moved(self.outer.common_step(step))
        known = self.exchange.finish()
        self._book("backward", comm, known[-1].wait_s if comm.wait_s is None else comm.wait_s)
        self._book("optimizer", outer, outer.wait_s or 0.0)
        self.timer.add("wait", self.exchange.late_s)
        wants_stop = self._settle(known)
        self._record(step, (comm, outer), own_loss=loss_sum / self.own_tokens, lr=lr, grad_norm=own.norm)
        self._look_for_stragglers(known)
        return wants_stop

    def at(self, step: int, cursor: int) -> Progress:
        lineage = self.world.lineage
        # After going back to a checkpoint the history says of which step that was; the agents don't know it.
        known = {name for name, _ in self.history}
        forks = tuple((str(fork.lineage), fork.step) for fork in lineage.forks if str(fork.lineage) not in known)
        return Progress(step, cursor, str(self.world.generation), str(lineage.name), (*self.history, *forks))

    def end_at_edge(self) -> None:
        """Raises where all ranks have agreed to stop together; inside a round that would be done again, at its end."""
        if self._edge and self.outer.common_step(self.progress.step) == self.progress.step:
            raise StepBoundary(f"all ranks stop together after step {self.progress.step}")

    def let_go(self) -> None:
        """Of everything that holds the group of a world that is over."""
        with suppress(OSError, RuntimeError, ShoalError):
            self.sync.close()
        self.sync, self.outer = NoExchange(self.model), EveryStep()
        self.exchange.let_go()
        self.recorder.let_go()
        self.world = without_group(self.world)

    def begin_anew(self, world: World, step: int, cursor: int) -> None:
        """In another world, from here on. What was on its way in the last one is gone."""
        self.world = world
        self.judge_stragglers_anew()
        self.progress = self.at(step, cursor)
        self._begun.clear()
        self._edge, self._unsound = False, None
        self.optimizer.zero_grad(set_to_none=True)

    def judge_stragglers_anew(self) -> None:
        weights = weights_of(self.config.run, range(self.launched))
        self.stragglers.begin_anew(self.world.names, self.world.ids, weights)

    def unknown(self) -> list[Progress]:
        """Where the steps began of which this rank does not know the world's loss."""
        return list(self._begun)

    def settle(self) -> bool:
        """Waits for what ranks have told each other of all steps so far; whether anybody wants to stop."""
        return self._settle(self.exchange.drain())

    @property
    def global_batch(self) -> int:
        return self.batches.shard.deal.global_batch

    @property
    def global_tokens(self) -> int:
        return self.global_batch * self.config.model.seq_len

    @property
    def own_tokens(self) -> int:
        return self.batches.shard.deal.share(self.world.rank) * self.config.model.seq_len

    def _forward_backward(self) -> tuple[float, CommTimes]:
        scale = self.sync.loss_scale(self.global_tokens)
        loss_sum = 0.0
        remaining = self.batches.shard.deal.micro_batches[self.world.rank]
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

    def _commit(self) -> None:
        """What every rank has. Where a round ends with an exchange of its own, others may not have come to its end when
        this rank has: its steps are theirs, too, when they have all begun another one. That is known later than a short
        round lasts, so the newest round counts that is known to have ended everywhere."""
        through = self.outer.common_step(self.progress.step)
        if self.outer.in_rounds:
            every = self.outer.round_steps
            through = min(through, self.recorder.newest_pending // every * every)
        self.recorder.commit(through)

    def _fetch(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.batches.micro_batches(self.progress.cursor)
        while True:
            with self.timer.phase("data"):
                block = next(rows, None)
                pair = None if block is None else split(block, self.world.device)
            if pair is None:
                return
            yield pair

    def _outcome(self, step: int, loss_sum: float) -> StepResult:
        with self.timer.phase("optimizer"):
            norm = clip(self.model.parameters(), self.config.train.clip)
        return StepResult(step, loss_sum, norm, self.batches.shard.positions(self.progress.cursor))

    def _update(self, lr: float, own: StepResult) -> None:
        """Where gradients are summed every rank has the same norm, so all refuse the step here. Elsewhere the others
        learn of it later: until then this rank goes along, and what it brings to a round stays a number."""
        if not own.is_sound:
            self._unsound = self._unsound or own
        if not math.isfinite(own.norm) and not self.outer.drifts:
            self._refuse()
        with self.timer.phase("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self.fence.applying(self.outer.common_step(own.step)):
                if self._unsound is None:
                    self.optimizer.step()
                self._advance(own.step)
            self.optimizer.zero_grad(set_to_none=True)

    def _outer_step(self, step: int) -> CommTimes:
        with self.timer.phase("optimizer"):
            try:
                return self.outer.after(step, last=step == self.config.train.steps)
            except NotFinite:
                self._refuse()
                raise

    def _book(self, phase: str, comm: CommTimes, wait_s: float) -> None:
        """The end of a phase was communication: a part of it waiting for a peer, the rest the network's."""
        wait_s = min(max(wait_s, 0.0), comm.tail_s)
        self.timer.move(phase, "wait", wait_s)
        self.timer.move(phase, "exposed", comm.tail_s - wait_s)

    def _advance(self, step: int) -> None:
        self._begun.append(self.progress)
        self.progress = self.at(step, self.progress.cursor + self.global_batch)

    def _settle(self, known: list[StepStats]) -> bool:
        """Steps of which everybody's figures are in can be committed."""
        for shared in known:
            before = self._begun.popleft()
            loss = shared.loss_sum / self.global_tokens
            if not math.isfinite(loss):
                self._refuse()
            self.recorder.propose(before.step + 1, before.cursor, before.cursor + self.global_batch, loss)
            self._edge |= shared.edge
        return any(shared.stop for shared in known)

    def _record(self, step: int, exchanges: tuple[CommTimes, ...], **figures: float) -> None:
        self.times = self.timer.finish()
        for name, seconds in (
            ("allreduce", [comm.allreduce_s for comm in exchanges if comm.allreduce_s is not None]),
            ("hidden", [comm.hidden_s for comm in exchanges if comm.hidden_s is not None]),
        ):
            if seconds:
                self.times[name] = sum(seconds)
        self.recorder.step(step, self.times, tokens=self.global_tokens, **figures)

    def _look_for_stragglers(self, known: list[StepStats]) -> None:
        """All ranks judge alike, so that none repeats what another has said before it left; the first one speaks."""
        work, exposed_s = self.batches.shard.deal.micro_batches, self.times.get("exposed", 0.0)
        for shared in known:
            for slow in self.stragglers.saw(shared.told, work, self.times["step"], exposed_s):
                if self.world.is_main:
                    self.recorder.warn(slow, step=self.progress.step)

    def _refuse(self) -> None:
        """Where all ranks have come to know of the same trouble in the same place: they can still tell each other
        whose it is."""
        error = refuse(self.world, self._unsound, self.model.parameters(), self.config.train.lr)
        if error is not None:
            raise error

    def _seed_dropout(self, step: int) -> None:
        """A function of rank and step instead of a running generator: resuming is exact without saving its state."""
        if self.config.model.dropout:
            torch.manual_seed((self.config.train.seed + self.world.rank) * 1_000_003 + step)


def split(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and the same shifted by one as targets."""
    block = torch.from_numpy(rows).to(device)
    return block[:, :-1], block[:, 1:]


# SECTION train/exchanges
# A trainer's exchanges with the other ranks: made from the configuration, and replaced between two steps.


@dataclass(frozen=True)
class Exchanges:
    sync: GradientSync
    outer: OuterSync
    steps: StepGather


def make_exchanges(config: Config, model: GPT, world: World, deal: BatchPlan) -> Exchanges:
    share = deal.share(world.rank)
    outer = make_outer(config.sync, model, world, weight=share / deal.global_batch)
    if config.sync.is_outer:
        sync: GradientSync = NoExchange(model, own_tokens=share * config.model.seq_len)
    else:
        sync = make_gradient_sync(config.sync, model, world, tokens=deal.micro_batch * config.model.seq_len)
    bear_with(world, exchange_timeout_s(config.sync, outer))
    return Exchanges(sync, outer, StepGather(world, outer.lag_steps))


def exchange_timeout_s(sync: SyncConfig, outer: OuterSync) -> float:
    """A rank that may be so many steps ahead waits for as many steps of the slowest before a rank counts as dead."""
    return sync.timeout_s * (1 + outer.lag_steps)


def change_exchanges(trainer: Trainer, sync: SyncConfig) -> None:
    """Between two steps, when all ranks are known to have done the last one: what the model holds is common to all."""
    trainer.sync.close()
    # What is not needed any more goes before new room is taken: gradients of 124M parameters are 496 MB.
    trainer.sync = NoExchange(trainer.model)
    gc.collect()
    trainer.config = trainer.config.model_copy(update={"sync": sync})
    made = make_exchanges(trainer.config, trainer.model, trainer.world, trainer.batches.shard.deal)
    trainer.sync, trainer.outer, trainer.exchange = made.sync, made.outer, made.steps
    trainer.outer.rewind(trainer.progress.step, flying=0)


def describe_exchanges(trainer: Trainer) -> dict[str, object]:
    """What `start` and `choice` events say of it."""
    shapes = shapes_of(trainer.model)
    sync = trainer.config.sync
    return {
        "sync": sync.mode,
        "wire": sync.wire,
        "grad_bytes": grad_bytes(shapes, sync.wire) + trainer.sync.extra_bytes,
        "round_steps": trainer.outer.round_steps,
        "wire_made_by": made_by(sync.wire),
        "inside": trainer.sync.inside.way,
        "inside_note": trainer.sync.inside.note,
    }


def shapes_of(model: GPT) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in model.parameters())

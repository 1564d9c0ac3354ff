"""One replica and its step: fetch, forward, backward, clip, update, record.

Timing, wire format, shares and outer steps arrive as objects: the step has no feature branches, and a world of one is
no exception.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from shoal.config.schema import Config
from shoal.cost.batch import learning_rate, weights_of
from shoal.data.batches import Batches, Rows
from shoal.errors import ShoalError
from shoal.model.gpt import GPT
from shoal.sync.exchange import Shared, StepExchange
from shoal.sync.gradients import Alone, GradientSync
from shoal.sync.membership.fence import AtEdge, Fence, OpenFence
from shoal.sync.outer import EveryStep, Outer
from shoal.sync.piece import NotFinite
from shoal.sync.timer import StepTimer
from shoal.sync.times import CommTimes
from shoal.sync.world import World, without_group
from shoal.train.checkpoint import Progress
from shoal.train.clip import clip
from shoal.train.laggards import Laggards
from shoal.train.recorder import Recorder
from shoal.train.refusal import Outcome, refuse
from shoal.train.tuning import Choice


class StopWish:
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
    outer: Outer
    exchange: StepExchange
    batches: Batches
    timer: StepTimer
    recorder: Recorder
    stop: StopWish
    peak_lr: float
    progress: Progress
    fence: Fence = field(default_factory=OpenFence)
    history: tuple[tuple[str, int], ...] = ()
    tended_step: int = 0
    evaluated_step: int = -1
    largest_micro_batch: int = 1
    # How many ranks the launch had; a rank that joined later has a higher id.
    launched: int = 0
    laggards: Laggards = field(default_factory=Laggards)
    compute: Choice = field(default_factory=Choice)
    times: dict[str, float] = field(default_factory=dict)
    between_steps: Callable[[], None] = field(default=lambda: None)
    _begun: deque[Progress] = field(default_factory=deque)
    _edge: bool = False
    _unsound: Outcome | None = None

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
        self._look_for_laggards(known)
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
            raise AtEdge(f"all ranks stop together after step {self.progress.step}")

    def let_go(self) -> None:
        """Of everything that holds the group of a world that is over."""
        with suppress(OSError, RuntimeError, ShoalError):
            self.sync.close()
        self.sync, self.outer = Alone(self.model), EveryStep()
        self.exchange.let_go()
        self.recorder.let_go()
        self.world = without_group(self.world)

    def begin_anew(self, world: World, step: int, cursor: int) -> None:
        """In another world, from here on. What was on its way in the last one is gone."""
        self.world = world
        self.judge_laggards_anew()
        self.progress = self.at(step, cursor)
        self._begun.clear()
        self._edge, self._unsound = False, None
        self.optimizer.zero_grad(set_to_none=True)

    def judge_laggards_anew(self) -> None:
        weights = weights_of(self.config.run, range(self.launched))
        self.laggards.begin_anew(self.world.names, self.world.ids, weights)

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

    def _outcome(self, step: int, loss_sum: float) -> Outcome:
        with self.timer.phase("optimizer"):
            norm = clip(self.model.parameters(), self.config.train.clip)
        return Outcome(step, loss_sum, norm, self.batches.shard.positions(self.progress.cursor))

    def _update(self, lr: float, own: Outcome) -> None:
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

    def _settle(self, known: list[Shared]) -> bool:
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

    def _look_for_laggards(self, known: list[Shared]) -> None:
        """All ranks judge alike, so that none repeats what another has said before it left; the first one speaks."""
        work, exposed_s = self.batches.shard.deal.micro_batches, self.times.get("exposed", 0.0)
        for shared in known:
            for slow in self.laggards.saw(shared.told, work, self.times["step"], exposed_s):
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

"""From one generation to the next, in the same process: the group is freed and formed anew, states are compared,
ranks that are behind copy the furthest state beside their own and swap when it is whole, and the training goes on from
there. All ranks of the new world do the same.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from shoal.control.rank_messages import EnterGeneration
from shoal.cost.batch_plan import deal_anew, weights_of
from shoal.errors import OutOfMemory, RunFailed, ShoalError
from shoal.run_folder import RunFolder
from shoal.sync.fence import GenerationEnded, StepBoundary
from shoal.sync.membership_client import MembershipClient
from shoal.sync.process_groups import unform
from shoal.sync.replicas import combined, gather, tensor_digests
from shoal.sync.world import RankIdentity, World, bear_with, form, is_lost_peer
from shoal.train import recorder
from shoal.train.auto_sync import SyncChooser
from shoal.train.autotune import ComputeChoice, apply
from shoal.train.build import ResumeContext, deal_batches, found, initialize
from shoal.train.checkpoint import CheckpointFolder, empty_moments, load_moments, load_weights, moments, weights
from shoal.train.resume import find_newest
from shoal.train.saving import WRITE_TIMEOUT_S, replica_state
from shoal.train.state_transfer import (
    JoinerInfo,
    LedgerSync,
    NoSurvivingState,
    Replica,
    ReplicaState,
    Transfer,
    TransferPlan,
    bring_ledger,
    compare,
    tell_document,
)
from shoal.train.trainer import Trainer, make_exchanges

_MOST_BROKEN_RECOVERIES = 5


@dataclass
class GenerationChanger:
    """What a rank needs to go from one generation to the next. `has_state`: there is something here to go on from."""

    member: MembershipClient
    store: dist.Store
    place: RankIdentity
    trainer: Trainer
    chooser: SyncChooser
    run: RunFolder
    has_state: bool = True
    _retreated: int = 0
    _lasting: dict[str, Tensor] = field(default_factory=dict)
    _is_let_go: bool = False
    # This machine's ledger lacks steps of the state that this rank has copied.
    _owes_ledger: bool = False
    # Recoveries in a row that broke before a step could be done.
    _broken_recoveries: int = 0

    def regroup(self, error: Exception) -> None:
        """After an exchange failed, or all stopped at an edge. Returns when the training can go on; raises what has
        nothing to do with membership."""
        began = time.perf_counter()
        self._leave(error)
        while not self.try_to_enter(self.member.await_enter(), began):
            pass

    def try_to_enter(self, enter: EnterGeneration, since: float) -> bool:
        """False when this generation was over before it could train."""
        try:
            self._enter(enter, waited_s=time.perf_counter() - since)
        except Exception as error:
            self._leave(error)
            return False
        return True

    def _leave(self, error: Exception) -> None:
        """Out of the generation, and says so; what is not a lost peer is raised again."""
        fence = self.member.fence
        if isinstance(error, StepBoundary):
            self.member.halted(fence.generation)
        elif not isinstance(error, GenerationEnded) and not fence.is_over:
            if not is_lost_peer(error) and not isinstance(error, NoSurvivingState):
                raise error
            self.member.broken(fence.generation, _first_line(error))
        step, why = self.trainer.progress.step, _first_line(error)
        self.trainer.recorder.event("lost", generation=str(fence.generation), step=step, why=why)
        # Its frames hold the group, and with it threads and connections.
        error.__traceback__ = error.__context__ = None

    def _enter(self, enter: EnterGeneration, waited_s: float) -> None:
        began = time.perf_counter()
        self._let_go()
        sync = self.trainer.config.sync
        world = form(enter, self.store, self.place, sync.join_timeout_s, sync.timeout_s)
        formed = time.perf_counter()
        copied = self._take_part(world, enter)
        done = time.perf_counter()
        self.member.formed(enter.generation, done - formed)
        self.trainer.recorder.commit(self.trainer.outer.common_step(self.trainer.progress.step))
        self.note_entered(
            how="recovered" if enter.recovers else "regrouped" if enter.holds else "joined",
            waited_s=round(waited_s, 6),
            formed_s=round(formed - began, 6),
            copied_s=round(done - formed, 6),
            copied=copied,
        )

    def note_entered(self, how: str, **figures: object) -> None:
        world = self.trainer.world
        self.trainer.recorder.event(
            "membership",
            generation=str(world.generation),
            lineage=str(world.lineage.name),
            world_rank=world.rank,
            size=world.size,
            ids=list(world.ids),
            step=self.trainer.progress.step,
            how=how,
            **figures,
        )

    def _let_go(self) -> None:
        """C++ frees a group's threads and buckets when nobody holds it any more."""
        trainer = self.trainer
        if self.has_state and not self._is_let_go:
            self._retreated = trainer.outer.retreat(trainer.progress.step)
            self._lasting = trainer.outer.lasting()
        self._is_let_go = True
        trainer.let_go()
        gc.collect()
        unform()

    def _take_part(self, world: World, enter: EnterGeneration) -> bool:
        """Makes this rank's state that of the furthest rank; whether any rank had to copy.

        Until `_adopt` nothing of this rank is changed: when a peer is lost during the copy, the rank still has the
        state, the records and the settings it came with, and says so to the next generation. `_adopt` is local, so a
        rank has either its old state or the new one, whole. What follows it (exchanges, ledger) only adds to the new
        one.
        """
        trainer = self.trainer
        # The same in every generation of a launch.
        trainer.launched = enter.launched
        if enter.recovers:
            self._recover(world, enter.launched)
            return True
        verdict = compare(world, self._stand(enter))
        if verdict.step < enter.state.step:
            raise RunFailed(
                f"generation {enter.generation} begins with step {enter.state.step}, and nobody in it is further than "
                f"{verdict.step}",
                why="whoever had that state has lost it",
                fix=f"go on from the last checkpoint: shoal train --resume {self.run.path}",
            )
        training = self._training(verdict.step).tell(world, verdict.source)
        pending = LedgerSync(trainer, self.run.commits, self._retreated).share_pending(world, verdict)
        history = tell_document(world, verdict.source, trainer.history)
        # A guest's own state belongs to another training: no generation goes on from it.
        self.has_state &= enter.holds
        received = self._receive(world, verdict, training)
        with self.member.fence.replacing(verdict.step):
            self._adopt(world, verdict, training, received)
            trainer.history = tuple((lineage, step) for lineage, step in history)
            trainer.recorder.hold(pending)
        del received
        self._make_exchanges(verdict.step)
        self._bring_ledger(world)
        if world.keeps_files:
            # An empty copy lacked all of them before it was brought up to date.
            pending = recorder.missing(self.run.commits, pending)
        trainer.recorder.begin_anew(world, pending)
        self._is_let_go = False
        return bool(verdict.behind)

    def _receive(self, world: World, verdict: TransferPlan, training: JoinerInfo) -> Replica:
        """The source's state beside this rank's own, compared over the group: the last exchange before `_adopt`."""
        trainer = self.trainer
        is_outer = self.chooser.foresee(training.sync).is_outer
        own = Replica(weights(trainer.model), self._lasting, moments(trainer.model, trainer.optimizer))
        transfer = Transfer(world, verdict, is_outer, training.has_moments, lambda: empty_moments(trainer.model))
        shapes = transfer.tell_shapes(own) if transfer.sends_common else {}
        if transfer.sent_bytes(own, shapes):
            trainer.recorder.event(
                "copy",
                generation=str(world.generation),
                source=world.ids[verdict.source],
                behind=[world.ids[rank] for rank in verdict.behind],
                step=verdict.step,
                bytes=transfer.sent_bytes(own, shapes),
            )
        try:
            room = transfer.make_room(own, shapes, self.has_state)
        except MemoryError as error:
            self._give_up_own(error, is_behind=world.rank in verdict.behind)
            room = transfer.make_room(own, shapes, has_state=False)
        transfer.run(room)
        if compared := transfer.compared(room):
            _check_copies(world, compared)
        return room

    def _give_up_own(self, error: MemoryError, is_behind: bool) -> None:
        """Without room for a second copy this rank receives in place, as a new rank does: if the source is lost during
        the copy, another rank has to have a state, or the run goes back to a checkpoint. A rank that agrees with the
        source risks its inner moments only, and those are copied again in the next generation."""
        if is_behind:
            self.member.fence.lose_state()
            self.has_state = False
        self.trainer.recorder.warn(
            OutOfMemory(
                f"no memory for a second copy of the state ({error}): it is overwritten while it is being received",
                why="if the sending rank is lost during the copy, this rank has no state left",
                fix="give the machine more memory, or use a smaller micro-batch: --set train.micro_batch=…",
            )
        )

    def _adopt(self, world: World, verdict: TransferPlan, training: JoinerInfo, received: Replica) -> None:
        """Local: no other rank can interrupt it."""
        trainer = self.trainer
        self.has_state = False
        if world.rank in verdict.behind:
            trainer.recorder.forget_committed()
            self._owes_ledger = True
            load_weights(trainer.model, received.weights)
        self._lasting = received.lasting
        if training.has_moments:
            load_moments(trainer.model, trainer.optimizer, received.moments, verdict.step)
        self._settle_in(world, verdict.step, training)
        self.has_state, self._retreated = True, verdict.step

    def _recover(self, world: World, launched: int) -> None:
        """No rank has a state: all go back to the newest checkpoint that one of them has, or to the first step where
        the run was lost before its first checkpoint. If that breaks, the next generation does it again, but not
        without limit: a cause that stays would keep the ranks busy for ever."""
        trainer, checkpoints = self.trainer, self._checkpoints()
        if self._broken_recoveries >= _MOST_BROKEN_RECOVERIES:
            raise _cannot_recover(self._broken_recoveries, self.run.path)
        self._broken_recoveries += 1
        self.member.fence.lose_state()
        self.has_state = False
        # Ranks without files wait while the others read theirs.
        bear_with(world, WRITE_TIMEOUT_S)
        newest = find_newest(world, trainer.recorder, checkpoints)
        own_last = recorder.last_step(self.run.commits) if world.keeps_files else 0
        kept = gather(world, [newest.progress is not None, own_last, trainer.compute.compiled, _is_bf16(trainer)])
        has_checkpoint, lost_step = any(row[0] for row in kept), max(row[1] for row in kept)
        if not has_checkpoint and lost_step >= trainer.config.train.checkpoint_every:
            raise _no_checkpoint(lost_step, self.run.path)
        trainer.history = ()
        trainer.begin_anew(world, 0, 0)
        # Records of steps that are lost must not be committed again.
        trainer.recorder.forget_committed()
        if not world.keeps_files:
            # All of them are behind the checkpoint, which is not saved before the ledger is.
            trainer.recorder.drop_unwritten()
        trainer.recorder.begin_anew(world, [])
        self.chooser.begin_anew()
        trainer.config = trainer.config.model_copy(update={"sync": self.chooser.begun})
        initialize(trainer)
        is_compiled = any(row[2] for row in kept)
        found(trainer, self.chooser, self.run, has_checkpoint, ResumeContext(launched, is_compiled, newest))
        trainer.evaluated_step = -1
        self._compute_as(is_compiled, any(row[3] for row in kept))
        with trainer.outer.common():
            _check_copies(world, replica_state(trainer))
        step = trainer.progress.step
        self._lasting, self._retreated = trainer.outer.lasting(), trainer.outer.common_step(step)
        self.member.fence.moved(self._retreated)
        self.has_state, self._is_let_go = True, False
        self._owes_ledger = own_last < lost_step
        self._bring_ledger(world)
        trainer.recorder.begin_anew(world, [])
        redone = max(0, lost_step - step)
        trainer.recorder.event("recovery", step=step, lost_step=lost_step, redone=redone)
        if world.is_main:
            trainer.recorder.warn(_went_back(step, redone), step=step)
        self._broken_recoveries = 0

    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.run.checkpoints, self.trainer.config.train.keep_checkpoints)

    def _bring_ledger(self, world: World) -> None:
        given_up = bring_ledger(
            world, self._owes_ledger, self.run.commits, self.member.given_up(), self.trainer.recorder.open_ledger
        )
        self._owes_ledger = False
        self.member.forget_given_up(given_up)
        if world.keeps_files:
            for each in given_up:
                self._checkpoints().set_aside_lineage(str(each.lineage), each.shared_step)

    def _stand(self, enter: EnterGeneration) -> ReplicaState:
        if not self.has_state or not enter.holds:
            return ReplicaState(holds=False, step=0, digest=0)
        return ReplicaState(True, self._retreated, combined(tensor_digests(self._state())), self._unknown())

    def _unknown(self) -> int:
        """Steps of our state of which we have not learned the world's loss."""
        return sum(before.step < self._retreated for before in self.trainer.unknown())

    def _state(self) -> dict[str, Tensor]:
        """What all replicas have in common: inner moments where gradients are exchanged, the outer ones elsewhere."""
        trainer = self.trainer
        if trainer.config.sync.is_outer:
            return {**weights(trainer.model), **self._lasting}
        return {**weights(trainer.model), **moments(trainer.model, trainer.optimizer)}

    def _training(self, step: int) -> JoinerInfo:
        trainer, deal = self.trainer, self.trainer.batches.shard.deal
        cursor = trainer.progress.cursor - (trainer.progress.step - step) * deal.global_batch
        return JoinerInfo(
            cursor=max(0, cursor),
            global_batch=deal.global_batch,
            micro_batch=trainer.largest_micro_batch,
            peak_lr=trainer.peak_lr,
            tended_step=trainer.tended_step,
            evaluated_step=trainer.evaluated_step,
            has_moments=bool(trainer.optimizer.state),
            compiled=trainer.compute.compiled,
            bf16=_is_bf16(trainer),
            sync=self.chooser.tell(),
        )

    def _settle_in(self, world: World, step: int, training: JoinerInfo) -> None:
        """The same training in another world: the global batch stays, its shares are dealt anew."""
        trainer = self.trainer
        trainer.begin_anew(world, step, training.cursor)
        trainer.peak_lr = training.peak_lr
        trainer.tended_step, trainer.evaluated_step = training.tended_step, training.evaluated_step
        trainer.config = trainer.config.model_copy(update={"sync": self.chooser.follow(training.sync)})
        shares = weights_of(trainer.config.run, world.ids)
        trainer.largest_micro_batch = training.micro_batch
        dealt = deal_anew(training.global_batch, training.micro_batch, shares, training.compiled)
        trainer.batches = deal_batches(trainer.config, self.run, world, dealt)
        self._compute_as(training.compiled, training.bf16)

    def _compute_as(self, compiled: bool, bf16: bool) -> None:
        trainer = self.trainer
        if compiled != trainer.compute.compiled or bf16 != _is_bf16(trainer):
            trainer.compute = ComputeChoice(compiled, "bf16" if bf16 else "fp32", "as the others do")
            apply(trainer.compute, trainer.model)

    def _make_exchanges(self, step: int) -> None:
        trainer = self.trainer
        made = make_exchanges(trainer.config, trainer.model, trainer.world, trainer.batches.shard.deal)
        trainer.sync, trainer.outer, trainer.exchange = made.sync, made.outer, made.steps
        trainer.outer.rewind(step, flying=0)
        room = trainer.outer.lasting()
        for name, tensor in room.items():
            if (kept := self._lasting.get(name)) is not None:
                tensor.copy_(kept)
        self._lasting = room


def _is_bf16(trainer: Trainer) -> bool:
    return trainer.compute.precision == "bf16"


def _went_back(step: int, redone: int) -> RunFailed:
    where = f"the checkpoint of step {step}" if step else "the first step, since there was no checkpoint yet"
    return RunFailed(
        f"every rank that had the training's state was lost: the run goes on from {where}, "
        f"and {redone} steps are done again",
        why="ranks were lost within moments of each other, before one of the others had the state",
        fix="nothing to do; to lose fewer steps next time, save more often: --set train.checkpoint_every=…",
    )


def _no_checkpoint(lost_step: int, run: Path) -> RunFailed:
    return RunFailed(
        f"every rank that had the training's state was lost after step {lost_step}, and no machine has a checkpoint",
        why="the checkpoints are on a machine that is gone, or their files were removed or damaged",
        fix=f"bring that machine or the files back, then: shoal train --resume {run}",
    )


def _cannot_recover(times: int, run: Path) -> RunFailed:
    return RunFailed(
        f"the run went back to a checkpoint {times} times, and a machine was lost each time before the first step",
        why="machines fail again and again, or a disk is too slow to read a checkpoint in time",
        fix=f"look at the logs of the ranks (shoal report {run}), then: shoal train --resume {run}",
    )


def _check_copies(world: World, state: dict[str, Tensor]) -> None:
    digests = {digest for [digest] in gather(world, [combined(tensor_digests(state))])}
    if len(digests) > 1:
        raise RunFailed(
            "a copied state is not the one that was sent",
            why="a machine's memory or network card changes bits, since the connection itself is checked",
            fix="find out which machine it is: shoal verify RUN; then test its memory",
        )


def _first_line(error: Exception) -> str:
    text = error.seen if isinstance(error, ShoalError) else str(error)
    return text.strip().split("\n")[0] or type(error).__name__

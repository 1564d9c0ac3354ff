"""Recovery: move a rank from one generation to the next within the same process.

    1. Leave the broken generation and release its process group.
    2. Form the process group of the new generation.
    3. Compare states and find the replica that is ahead.
    4. Copy its state beside the own one; swap when the copy is complete.
    5. Reconcile the ledger, make the exchanges, continue training.

All ranks of the new world do the same. If no rank has a state left, all return to the newest checkpoint instead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from shoal.control.rank_messages import EnterGeneration
from shoal.engine import recorder
from shoal.engine.agreement import check_same_training
from shoal.engine.auto_sync import SyncChooser
from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.replica import Replica
from shoal.engine.resume import find_newest
from shoal.engine.saving import WRITE_TIMEOUT_S, replica_state
from shoal.engine.sharded_recovery import (
    AtWork,
    OldParts,
    choose_parts_source,
    complete_weights,
    finish_update,
    move_parts,
)
from shoal.engine.sharded_state import DividedOptimizers
from shoal.engine.start_training import ResumeContext, start_training
from shoal.engine.state_transfer import (
    CopiedState,
    JoinerInfo,
    NoSurvivingState,
    ReplicaState,
    Transfer,
    TransferPlan,
    agree_on_source,
    share_pending,
    sync_ledgers,
)
from shoal.errors import OutOfMemory, PeerLost, RunFailed, ShoalError
from shoal.run_folder import RunFolder
from shoal.sync.communication import is_timeout
from shoal.sync.fence import GenerationEnded, StepBoundary
from shoal.sync.membership_client import MembershipClient
from shoal.sync.process_groups import GroupNotFormed, RankMissing, drop_groups
from shoal.sync.replicas import broadcast_integers, combine_digests, gather_integers, tensor_digests
from shoal.sync.world import RankIdentity, World, form_world, set_collective_timeout
from shoal.units import pluralize

_MAX_FAILED_RECOVERIES = 5
# How long the agents may take to learn of the loss that broke the first group of a launch. Longer: ranks that cannot
# connect report it later.
LOSS_KNOWN_S = 4.0


@dataclass
class GenerationChanger:
    """Moves a rank from one generation to the next."""

    member: MembershipClient
    store: dist.Store
    place: RankIdentity
    replica: Replica
    chooser: SyncChooser
    run: RunFolder
    # Called by all ranks when none of them has called it in its process: the program's own preparation of a launch.
    on_start: Callable[[], None] = lambda: None
    at_work: AtWork = nullcontext  # Allows the session's own calls of optimizers and scalers.
    has_started: bool = False  # This rank has called it.
    has_state: bool = True  # This rank has a state to continue from.
    # The step of that state, after an unfinished round of outer steps was undone, and its outer momentum.
    _state_step: int = 0
    _outer_momentum: dict[str, Tensor] = field(default_factory=dict)
    _has_released_group: bool = False
    _is_ledger_behind: bool = False  # This machine's ledger lacks steps of the state that this rank has copied.
    _failed_recoveries: int = 0  # Returns to a checkpoint in a row that failed before a step could be done.

    def change_generation(self, error: Exception) -> None:
        """Leave the generation that ended with `error`, and return when the training can continue in another one.

        Raises errors that have nothing to do with membership.
        """
        began = time.perf_counter()
        self._leave_generation(error)
        while not self.try_to_enter(self.member.await_enter(), began):
            pass

    def try_to_enter(self, enter: EnterGeneration, since: float) -> bool:
        """Enter a generation; return False if it ended before it could train."""
        try:
            self._enter(enter, waited_s=time.perf_counter() - since)
        except Exception as error:
            self._leave_generation(error)
            return False
        return True

    def leave_launch(self, error: Exception) -> None:
        """Leave the first generation of a launch, which ended with `error`; raise it again if no rank was lost.

        A group that cannot form is an error: a run does not begin with fewer ranks than it was asked for without a
        loss that the agents know of.
        """
        self._leave_generation(error)
        if not self.member.await_end(LOSS_KNOWN_S):
            raise error

    def _leave_generation(self, error: Exception) -> None:
        """Report to the agent that this rank has left; raise `error` again unless a lost peer is its cause."""
        fence = self.member.fence
        if isinstance(error, StepBoundary):
            self.member.leave_after_step(fence.generation)
        elif not isinstance(error, GenerationEnded) and not fence.is_over:
            if not isinstance(error, PeerLost | GroupNotFormed | NoSurvivingState):
                raise error
            timed_out = isinstance(error, RankMissing) or (isinstance(error, PeerLost) and is_timeout(error))
            self.member.send_broken(fence.generation, _first_line(error), timed_out)
        step, why = self.replica.progress.step, _first_line(error)
        self.replica.recorder.event("lost", generation=str(fence.generation), step=step, why=why)
        # The frames of a traceback hold the group, and with it threads and connections.
        error.__traceback__ = error.__context__ = error.__cause__ = None

    def _enter(self, enter: EnterGeneration, waited_s: float) -> None:
        began = time.perf_counter()
        self.release_group()
        sync = self.replica.config.sync
        world = form_world(enter, self.store, self.place, sync.join_timeout_s, sync.timeout_s)
        formed = time.perf_counter()
        if enter.recovers:
            self._return_to_checkpoint(world, enter.launched)
            has_copied = True
        else:
            has_copied = self._continue_from_furthest(world, enter)
        done = time.perf_counter()
        can_lose_parts = self.replica.shards.can_lose_parts(sync, world)
        self.member.send_formed(enter.generation, done - formed, self.replica.history, can_lose_parts)
        self.replica.recorder.commit(self.replica.outer.common_step(self.replica.progress.step))
        self.record_entry(
            how="recovered" if enter.recovers else "regrouped" if enter.has_state else "joined",
            waited_s=round(waited_s, 6),
            formed_s=round(formed - began, 6),
            copied_s=round(done - formed, 6),
            copied=has_copied,
        )

    def record_entry(self, how: str, **fields: object) -> None:
        world = self.replica.world
        self.replica.recorder.event(
            "membership",
            generation=str(world.generation),
            lineage=str(world.lineage.name),
            world_rank=world.rank,
            size=world.size,
            ids=list(world.ids),
            step=self.replica.progress.step,
            how=how,
            **fields,
        )

    def release_group(self) -> None:
        """Undo an unfinished round and drop all references to the process group.

        C++ frees a group's threads and buckets when the last reference to it is gone.
        """
        replica = self.replica
        if self.has_state and not self._has_released_group:
            self._state_step = replica.roll_back()
            self._outer_momentum = replica.outer.persistent_state()
        self._has_released_group = True
        replica.leave_world()
        gc.collect()
        drop_groups()

    def _continue_from_furthest(self, world: World, enter: EnterGeneration) -> bool:
        """Make this rank's state that of the furthest rank; return whether any rank had to copy.

        Until `_adopt` nothing of this rank is changed: if a peer is lost during the copy, the rank still has the state,
        the records and the settings it came with, and reports them to the next generation. `_adopt` is local, so a rank
        has either its old state or the new one, whole. What follows it (exchanges, ledger) only adds to the new one.
        """
        replica = self.replica
        parts = None
        if replica.config.sync.is_sharded:
            replica.state.are_weights_divided = replica.config.sync.shard_level == 3
            parts = self._complete_step(world, enter)
        plan = agree_on_source(world, self._describe_state(enter))
        if plan.step < enter.state.step:
            raise RunFailed(
                f"generation {enter.generation} starts at step {enter.state.step}, but no rank in it is further than "
                f"step {plan.step}",
                why="the rank that had that state has lost it",
                fix=f"resume from the last checkpoint: shoal train --resume {self.run.path}",
            )
        check_same_training(world, replica.state, plan.source)
        info = self._describe_training(plan.step).broadcast(world, plan.source)
        pending = share_pending(replica, self.run.commits, self._state_step, world, plan)
        # The state of a joining node belongs to another training: no generation continues from it.
        self.has_state &= enter.has_state
        received = self._receive(world, plan, info)
        divided = None if parts is None else move_parts(replica, world, parts, received.optimizer)
        with self.member.fence.replace_state(plan.step):
            self._adopt(world, plan, info, received, divided)
            replica.set_history(info.history)
            replica.recorder.hold(pending)
        del received
        self._connect(plan.step)
        self._sync_ledgers(world)
        if world.keeps_files:
            # An empty copy lacked all of these records before it was brought up to date.
            pending = recorder.missing_records(self.run.commits, pending)
        replica.recorder.enter_world(world, pending)
        self._has_released_group = False
        return bool(plan.behind)

    def _complete_step(self, world: World, enter: EnterGeneration) -> OldParts | None:
        """Make the states of all ranks that have begun the newest step's update the same: that after it.

        Return how the model was divided; None if no rank has a state.
        """
        replica, has_state = self.replica, self.has_state and enter.has_state
        self._state_step = finish_update(replica, world, has_state, self._state_step, self.at_work)
        if has_state:
            self.member.fence.set_step(self._state_step)
        source = choose_parts_source(world, replica.state.divided if has_state else None, self._state_step)
        if source is None:
            return None
        # Before any weights are sent: a rank that joins may have another model.
        check_same_training(world, replica.state, source)
        [newest] = broadcast_integers(world, source, [self._state_step])
        is_at_step = has_state and self._state_step == newest
        try:
            parts = complete_weights(replica, world, source, is_at_step)
            if is_at_step:
                with self.at_work():
                    replica.shards.call_after()
            return parts
        except NoSurvivingState:
            # All ranks raise it: none of them has a state that the others could continue from.
            self.member.fence.mark_overwritten()
            self.has_state = False
            raise

    def _describe_state(self, enter: EnterGeneration) -> ReplicaState:
        """Return what the other ranks need to know of this rank's state, with a digest of what all replicas share.

        That is the inner moments where gradients are exchanged, the outer momentum in the other modes.
        """
        if not self.has_state or not enter.has_state:
            return ReplicaState(has_state=False, step=0, digest=0)
        replica = self.replica
        is_outer = replica.config.sync.is_outer
        optimizer_state = self._outer_momentum if is_outer else replica.state.optimizer_state().tensors
        # The parameters of a divided model are equal already.
        weights = replica.state.buffers() if replica.config.sync.is_sharded else replica.state.weights()
        digest = combine_digests(tensor_digests({**weights, **optimizer_state}))
        unsettled = sum(step.began.step < self._state_step for step in replica.steps.unsettled)
        return ReplicaState(True, self._state_step, digest, unsettled)

    def _describe_training(self, step: int) -> JoinerInfo:
        replica = self.replica
        cursor = replica.progress.cursor - (replica.progress.step - step) * replica.global_batch
        return JoinerInfo(
            cursor=max(0, cursor),
            global_batch=replica.global_batch,
            micro_batch=replica.division.largest_micro_batch,
            periodic_done_step=replica.periodic.done_step,
            tasks_done=replica.periodic.tasks_done,
            reported_step=replica.periodic.reported_step,
            last_step=replica.steps.last_step,
            has_fixed_shapes=replica.division.has_fixed_shapes,
            sync=self.chooser.as_numbers(),
            speeds={str(id): speed for id, speed in replica.division.balance.speeds.items()},
            left_out={str(id): machines for id, machines in replica.division.balance.left_out.items()},
            history=replica.history,
        )

    def _receive(self, world: World, plan: TransferPlan, info: JoinerInfo) -> CopiedState:
        """Receive the source's state beside this rank's own and compare it over the group.

        This is the last exchange before `_adopt`.
        """
        replica = self.replica
        is_outer = self.chooser.preview(info.sync).is_outer
        own = CopiedState(replica.state.weights(), self._outer_momentum, replica.state.optimizer_state())
        transfer = Transfer(world, plan, is_outer)
        if not transfer.sends_optimizer:
            return own
        shape = transfer.broadcast_shape(own)
        if sent_bytes := transfer.count_bytes(own, shape):
            replica.recorder.event(
                "copy",
                generation=str(world.generation),
                source=world.ids[plan.source],
                behind=[world.ids[rank] for rank in plan.behind],
                step=plan.step,
                bytes=sent_bytes,
            )
        try:
            target = transfer.allocate(own, shape, self.has_state)
        except MemoryError as error:
            self._give_up_own_state(error, is_behind=world.rank in plan.behind)
            target = transfer.allocate(own, shape, has_state=False)
        transfer.run(target)
        if sent := transfer.sent_tensors(target):
            _check_equal(world, sent)
        return target

    def _give_up_own_state(self, error: MemoryError, is_behind: bool) -> None:
        """Prepare to receive in place, as a new rank does, because there is no memory for a second copy.

        If the source is lost during the copy, another rank must have a state, or the run returns to a checkpoint. A
        rank that agrees with the source risks only its inner moments, which the next generation copies again.
        """
        if is_behind:
            self.member.fence.mark_overwritten()
            self.has_state = False
        self.replica.recorder.warn(
            OutOfMemory(
                f"no memory for a second copy of the state ({error}): it is overwritten while it is being received",
                why="if the sending rank is lost during the copy, this rank has no state left",
                fix="give the machine more memory, or use a smaller micro-batch: --set train.micro_batch=…",
            )
        )

    def _adopt(
        self,
        world: World,
        plan: TransferPlan,
        info: JoinerInfo,
        received: CopiedState,
        divided: DividedOptimizers | None = None,
    ) -> None:
        """Replace this rank's state and settings by the received ones. Local: no other rank can interrupt it."""
        replica = self.replica
        self.has_state = False
        if world.rank in plan.behind:
            replica.recorder.forget_committed()
            self._is_ledger_behind = True
            replica.state.load_weights(received.weights)
        if divided is not None:
            replica.shards.adopt(divided)
        self._outer_momentum = received.outer_momentum
        if plan.behind or self.chooser.preview(info.sync).is_outer:
            replica.state.load_optimizer_state(received.optimizer)
        replica.enter_world(world, plan.step, info.cursor)
        replica.steps.last_step = info.last_step
        replica.restore_periodic(info.periodic_done_step, dict(info.tasks_done), info.reported_step)
        replica.set_sync(self.chooser.adopt(info.sync))
        replica.division.fix_shapes(info.has_fixed_shapes)
        replica.division.balance.adopt(
            {int(id): speed for id, speed in info.speeds.items()},
            {int(id): machines for id, machines in info.left_out.items()},
        )
        # The global batch stays; it is divided anew over the ranks of this world.
        replica.division.redivide(info.global_batch, info.micro_batch, world.ids)
        self.has_state, self._state_step = True, plan.step

    def _connect(self, step: int) -> None:
        """Make the exchanges of the new world and put the outer momentum into them."""
        self.replica.connect()
        outer = self.replica.outer
        outer.rewind(step, in_flight=0)
        outer_momentum = outer.persistent_state()
        for name, tensor in outer_momentum.items():
            if (copied := self._outer_momentum.get(name)) is not None:
                tensor.copy_(copied)
        self._outer_momentum = outer_momentum

    def _sync_ledgers(self, world: World) -> None:
        abandoned = sync_ledgers(
            world,
            self._is_ledger_behind,
            self.run.commits,
            self.member.abandoned_commits(),
            self.replica.recorder.open_ledger,
        )
        self._is_ledger_behind = False
        self.member.forget_abandoned_commits(abandoned)
        if world.keeps_files:
            for commits in abandoned:
                self._checkpoints().set_aside_lineage(str(commits.lineage), commits.shared_step)

    def _return_to_checkpoint(self, world: World, launched: int) -> None:
        """Return to the newest checkpoint of any rank, or to step 0 if the run was lost before its first checkpoint.

        Called when no rank has a state. If it fails, the next generation tries again, but not without limit: a cause
        that persists would keep the ranks busy forever.
        """
        replica = self.replica
        self._count_recovery()
        self.member.fence.mark_overwritten()
        self.has_state = False
        # Ranks without files wait while the others read theirs.
        set_collective_timeout(world, WRITE_TIMEOUT_S)
        newest = find_newest(world, replica.recorder, self._checkpoints())
        own_last = recorder.last_step(self.run.commits) if world.keeps_files else 0
        own = [newest.progress is not None, own_last, replica.division.has_fixed_shapes, self.has_started]
        columns = zip(*gather_integers(world, own), strict=True)
        has_checkpoint, lost_step, has_fixed_shapes, have_started = map(max, columns)
        if not has_checkpoint and (lost_step >= replica.config.train.checkpoint_every or replica.initial.reset is None):
            raise RunFailed(
                f"every rank that had the training's state was lost after step {lost_step}, "
                "and no machine has a checkpoint",
                why="the checkpoints are on a machine that is gone, or their files were removed or damaged",
                fix=f"bring that machine or the files back, then: shoal train --resume {self.run.path}",
            )
        self._forget_lost_steps(world)
        replica.division.fix_shapes(bool(has_fixed_shapes))
        start_training(replica, self.chooser, self.run, bool(has_checkpoint), ResumeContext(launched, newest))
        if not have_started:
            self.start()
        with replica.outer.common():
            _check_equal(world, replica_state(replica))
        step = replica.progress.step
        self._outer_momentum, self._state_step = replica.outer.persistent_state(), replica.outer.common_step(step)
        self.member.fence.set_step(self._state_step)
        self.has_state, self._has_released_group = True, False
        self._is_ledger_behind = own_last < lost_step
        self._sync_ledgers(world)
        replica.recorder.enter_world(world, [])
        self._report_recovery(world, step, lost_step)
        self._failed_recoveries = 0

    def start(self) -> None:
        """Let the program prepare its launch. All ranks of the world call this."""
        self.on_start()
        self.has_started = True

    def _count_recovery(self) -> None:
        if self._failed_recoveries >= _MAX_FAILED_RECOVERIES:
            raise RunFailed(
                f"the run went back to a checkpoint {self._failed_recoveries} times, and a machine was lost each time "
                "before the first step",
                why="machines fail again and again, or a disk is too slow to read a checkpoint in time",
                fix=f"look at the logs of the ranks (shoal report {self.run.path}), "
                f"then: shoal train --resume {self.run.path}",
            )
        self._failed_recoveries += 1

    def _forget_lost_steps(self, world: World) -> None:
        """Enter the world at step 0 with the initial state and settings, before a checkpoint is loaded over them."""
        replica = self.replica
        replica.set_history(())
        replica.enter_world(world, 0, 0)
        # Records of lost steps must not be committed again.
        replica.recorder.forget_committed()
        if not world.keeps_files:
            # All of them are before the checkpoint: it is saved after the ledger.
            replica.recorder.drop_unwritten()
        replica.recorder.enter_world(world, [])
        # Ranks that were started anew know no speeds. The checkpoint may have them.
        replica.division.balance.adopt({})
        self.chooser.reset()
        replica.set_sync(self.chooser.initial_sync)
        replica.shards.forget()
        if replica.initial.reset is not None:
            replica.initial.reset()

    def _report_recovery(self, world: World, step: int, lost_step: int) -> None:
        redone = max(0, lost_step - step)
        self.replica.recorder.event("recovery", step=step, lost_step=lost_step, redone=redone)
        if not world.is_main or not lost_step:
            # A rank was lost before the first step, and the agents have said so: there was no state yet.
            return
        where = f"the checkpoint of step {step}" if step else "the first step, since there was no checkpoint yet"
        is_sharded = self.replica.config.sync.is_sharded
        lost = "a part of the model" if is_sharded else "the training's state"
        warning = RunFailed(
            f"every rank that had {lost} was lost: the run goes on from {where}, and "
            f"{pluralize(redone, 'step')} {'is' if redone == 1 else 'are'} done again",
            why="no other rank kept a copy of the part (sync.copies)"
            if is_sharded
            else "ranks were lost within moments of each other, before one of the others had the state",
            fix=(
                "keep a copy of each part: --copies 1; or"
                if is_sharded
                else "nothing to do; to lose fewer steps next time,"
            )
            + " save more often: --set train.checkpoint_every=…",
        )
        self.replica.recorder.warn(warning, step=step)

    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.run.checkpoints, self.replica.config.train.keep_checkpoints)


def _check_equal(world: World, state: dict[str, Tensor]) -> None:
    digests = {digest for [digest] in gather_integers(world, [combine_digests(tensor_digests(state))])}
    if len(digests) > 1:
        raise RunFailed(
            "a copied state differs from the one that was sent",
            why="a machine's memory or network card changes bits, since the connection itself is checked",
            fix="find out which machine it is: shoal verify RUN; then test its memory",
        )


def _first_line(error: Exception) -> str:
    text = error.seen if isinstance(error, ShoalError) else str(error)
    return text.strip().split("\n")[0] or type(error).__name__

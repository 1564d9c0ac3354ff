"""Resume a run from the newest whole checkpoint, exactly if every rank finds its own shard of it.

Machines that trained apart during a network partition and never met again each have a checkpoint of their own lineage.
Continuing from one of them abandons the work of the other, which only the user can decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from shoal.engine.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    Progress,
    RankShards,
    no_checkpoint,
    read_progress,
    read_shard,
)
from shoal.engine.exchanges import exchange_timeout_s
from shoal.engine.recorder import Recorder
from shoal.engine.replica import Replica
from shoal.engine.saving import WRITE_TIMEOUT_S, Saver, load_own_state, optimizer_of_shard, schedule_of_shard
from shoal.engine.sharded_checkpoint import load_joined, load_joined_weights
from shoal.engine.state_transfer import broadcast_json, broadcast_state, gather_json
from shoal.engine.training_state import StateTree, fill
from shoal.errors import CheckpointError
from shoal.sync.replicas import broadcast_tensors, gather_integers
from shoal.sync.world import World, set_collective_timeout
from shoal.units import rank_list


@dataclass(frozen=True)
class LocalCheckpoint:
    """The newest checkpoint of a machine."""

    node: str
    progress: Progress


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest whole checkpoint of this machine, if this rank reads its files; and the damage of newer ones."""

    progress: Progress | None
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class _CheckpointInfo:
    """The chosen checkpoint, as all ranks know it."""

    step: int
    cursor: int
    has_moments: bool  # It has the inner optimizer's moments: they are common to all ranks.
    shards: RankShards | None


def shared_step(one: Progress, other: Progress) -> int:
    """Return the last step that both surely share.

    A lineage that both were in is one training up to the step at which the first of them left it.
    """
    one_left = {**dict(one.history), one.lineage: one.step}
    other_left = {**dict(other.history), other.lineage: other.step}
    common = one_left.keys() & other_left.keys()
    return max((min(one_left[name], other_left[name]) for name in common), default=0)


def have_diverged(one: Progress, other: Progress) -> bool:
    """Return whether both have steps that the other lacks. One that is merely behind can copy."""
    return shared_step(one, other) < min(one.step, other.step)


def choose_checkpoint(checkpoints: Mapping[int, LocalCheckpoint], lineage: str = "") -> int:
    """Return the rank with the furthest checkpoint, of `lineage` if that is given."""
    candidates = {
        rank: checkpoint
        for rank, checkpoint in checkpoints.items()
        if not lineage or checkpoint.progress.lineage == lineage
    }
    if not candidates:
        lineages = sorted({checkpoint.progress.lineage for checkpoint in checkpoints.values()})
        raise CheckpointError(
            f"no machine has a checkpoint of the lineage {lineage}" if checkpoints else "no machine has a checkpoint",
            why=f"there are: {', '.join(lineages)}" if checkpoints else "the run ended before its first one",
            fix="leave --lineage out, or name one of these"
            if checkpoints
            else "start anew: shoal train … --out NEW_FOLDER",
        )
    if not lineage:
        for pair in combinations(candidates.values(), 2):
            one, other = (checkpoint.progress for checkpoint in pair)
            if have_diverged(one, other):
                described = " and ".join(
                    f"{checkpoint.node} has step {checkpoint.progress.step} of lineage {checkpoint.progress.lineage}"
                    for checkpoint in pair
                )
                further = max(one, other, key=lambda progress: progress.step)
                raise CheckpointError(
                    f"the machines have two trainings: {described}; they share {shared_step(one, other)} steps",
                    why="they trained apart while they could not reach each other, and never met again",
                    fix=f"choose the one to continue, the other is abandoned: --lineage {further.lineage}",
                )
    return max(candidates, key=lambda rank: (candidates[rank].progress.step, -rank))


def find_newest(world: World, recorder: Recorder, folder: CheckpointFolder) -> NewestCheckpoint:
    """Find this machine's newest whole checkpoint; warn of each damaged one.

    Reads all bytes of a checkpoint, so it may take minutes on a slow disk.
    """
    damaged: list[str] = []

    def skip(error: CheckpointError) -> None:
        damaged.append(error.seen)
        recorder.warn(
            CheckpointError(
                error.seen,
                why="an older checkpoint is looked for; the steps since then are done again",
                fix="look at the disk, if this is not the first time: dmesg | tail",
            )
        )

    progress = folder.newest_whole(skip) if world.keeps_files else None
    return NewestCheckpoint(progress, tuple(damaged))


def resume_training(
    replica: Replica,
    folder: CheckpointFolder,
    before_load: Callable[[int, bool], None],
    lineage: str,
    newest: NewestCheckpoint | None = None,
) -> None:
    """Load the furthest checkpoint of any rank into all ranks and set the replica's progress to it.

    `before_load` receives the checkpoint's step, and whether its replicas had moments of their own. `lineage` is the
    one to continue, if machines trained apart. `newest` is the result of `find_newest`, if it was called already.
    """
    world = replica.world
    # Ranks without files wait while the others read theirs.
    set_collective_timeout(world, WRITE_TIMEOUT_S)
    newest = newest or find_newest(world, replica.recorder, folder)
    source, checkpoints = gather_checkpoints(world, folder, lineage, newest)
    checkpoint = folder.load_latest() if world.rank == source else None
    info = _broadcast_info(world, source, checkpoint)
    set_collective_timeout(world, exchange_timeout_s(replica.config.sync, replica.outer))
    step, cursor = info.step, info.cursor
    chosen = checkpoints[source].progress
    replica.set_history((*chosen.history, (chosen.lineage, step)))
    own = checkpoints.get(world.rank)
    if own is not None and have_diverged(own.progress, chosen):
        # The next resume would continue from what this machine has trained apart from the chosen lineage.
        folder.set_aside_newer(shared_step(own.progress, chosen))
    before_load(step, not info.has_moments)
    replica.restore_shares(chosen.shares)
    if not info.has_moments and not replica.config.sync.is_outer:
        raise CheckpointError(
            f"the checkpoint of step {step} is of replicas with moments of their own, and this run exchanges gradients",
            why="sync.mode was another, or with sync.mode=auto the events that record the choice are gone",
            fix="restore the run folder's events, or name the mode in its config.toml: shoal train --help",
        )
    _load_common(replica, source, checkpoint, info)
    replica.mark_round_start()
    if info.shards is None:
        replica.move_to(step, cursor)
        return
    shard, problem = _read_own_shard(folder, step, world.rank, info.shards)
    holders = [rank for rank, [has_shard] in enumerate(gather_integers(world, [shard is not None])) if has_shard]
    if shard is not None and info.shards.ranks == world.size == len(holders):
        load_own_state(replica, shard)
        replica.move_to(step, cursor)
        return
    _fall_back(replica, info, info.shards, shard, holders, problem)
    Saver(replica, folder, saved_step=-1).save(must=True)
    if world.keeps_files:
        folder.set_aside_newer(replica.progress.step)


def gather_checkpoints(
    world: World, folder: CheckpointFolder, lineage: str, newest: NewestCheckpoint
) -> tuple[int, dict[int, LocalCheckpoint]]:
    """Return the rank with the checkpoint to resume from, and the checkpoints of all ranks.

    Only checkpoints with correct sums count: a damaged one must not hide another machine's good one.
    """
    progress = asdict(newest.progress) if newest.progress else None
    documents = gather_json(world, {"node": world.node, "progress": progress, "damaged": newest.damaged})
    checkpoints = {
        rank: LocalCheckpoint(document["node"], read_progress(document["progress"]))
        for rank, document in enumerate(documents)
        if document["progress"]
    }
    if not checkpoints:
        raise no_checkpoint(folder.path, [seen for document in documents for seen in document["damaged"]])
    return choose_checkpoint(checkpoints, lineage), checkpoints


def _broadcast_info(world: World, source: int, checkpoint: Checkpoint | None) -> _CheckpointInfo:
    document: dict[str, Any] = {}
    if checkpoint is not None:
        document = {
            "step": checkpoint.progress.step,
            "cursor": checkpoint.progress.cursor,
            "has_moments": checkpoint.optimizer.values is not None,
            "shards": checkpoint.shards and asdict(checkpoint.shards),
        }
    document = broadcast_json(world, source, document)
    shards = document.pop("shards")
    return _CheckpointInfo(**document, shards=RankShards(**shards) if shards else None)


def _load_common(replica: Replica, source: int, checkpoint: Checkpoint | None, info: _CheckpointInfo) -> None:
    """Load what all replicas have in common on the source, and copy it to the other ranks."""
    state, outer = replica.state, replica.outer
    if checkpoint is not None:
        state.load_weights(checkpoint.model)
    broadcast_tensors(replica.world, source, state.weights().values())
    if state.are_weights_divided:
        load_joined_weights(state, replica.world, source, checkpoint.model if checkpoint is not None else None)
    replica.exchanges.totals.adopt()
    common_step, in_flight = (info.shards.step, info.shards.in_flight) if info.shards else (info.step, 0)
    outer.rewind(common_step, in_flight)
    outer_state = outer.state()
    if checkpoint is not None:
        fill(outer_state, checkpoint.optimizer.tensors)
    broadcast_tensors(replica.world, source, outer_state.values())
    if info.has_moments and state.divided is not None:
        load_joined(state, replica.world, source, checkpoint.optimizer if checkpoint is not None else None)
    elif info.has_moments:
        tree = broadcast_state(replica.world, source, checkpoint.optimizer if checkpoint is not None else None)
        state.load_optimizer_state(tree)


def _read_own_shard(
    folder: CheckpointFolder, step: int, rank: int, shards: RankShards
) -> tuple[StateTree | None, CheckpointError | None]:
    try:
        return read_shard(folder.folder(step), rank, shards.mark), None
    except CheckpointError as error:
        return None, error


def _fall_back(
    replica: Replica,
    info: _CheckpointInfo,
    shards: RankShards,
    own: StateTree | None,
    holders: list[int],
    problem: CheckpointError | None,
) -> None:
    """Continue from the common state, with the moments of one rank, because the shards do not fit or are not complete.

    `holders` are the ranks that have their shard.
    """
    world = replica.world
    replica.move_to(shards.step, shards.cursor)
    if not info.has_moments and holders:
        sent = own if world.rank == holders[0] else None
        replica.state.load_optimizer_state(broadcast_state(world, holders[0], sent and optimizer_of_shard(sent)))
        if shards.step < info.step:
            replica.state.load_schedule(broadcast_state(world, holders[0], sent and schedule_of_shard(sent)))
        replica.mark_round_start()
    elif not info.has_moments:
        replica.state.reset_optimizers()
    if problem is None and not world.is_main:
        return
    missing = [rank for rank in range(min(shards.ranks, world.size)) if rank not in holders]
    reasons = [f"it was saved by {shards.ranks} ranks, now there are {world.size}"] * (shards.ranks != world.size)
    reasons += [f"{rank_list(missing)} has no part of it"] if missing else []
    reasons += [problem.seen] if problem is not None else []
    replica.recorder.warn(
        CheckpointError(
            f"the checkpoint of step {info.step} cannot be resumed exactly: all ranks continue from their "
            f"common state of step {shards.step}",
            why="; ".join(reasons),
            fix="the steps since then are done again; to resume exactly, use the same ranks on the same machines",
        )
    )

"""How a run goes on: from the newest whole checkpoint, exactly where every rank finds its own part of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.sync.replicas import copy_from, gather, tell_all
from shoal.sync.world import World, bear_with
from shoal.train.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    Progress,
    RankShards,
    empty_moments,
    fill,
    load_moments,
    load_weights,
    moments,
    read_part,
    read_progress,
    weights,
)
from shoal.train.recorder import Recorder
from shoal.train.saving import WRITE_TIMEOUT_S, Saver, load_own_state
from shoal.train.state_transfer import gather_documents
from shoal.train.trainer import Trainer, exchange_timeout_s

# SECTION train/pasts
# Whether the checkpoints that lie on a run's machines are of one training, and which of them to go on from. Pure.
#
# Machines that trained apart, because they could not hear each other, and never met again each have a checkpoint of a
# lineage of their own. To go on from one of them gives up what the other did, which nobody but the user can decide.


@dataclass(frozen=True)
class LocalCheckpoint:
    """The newest checkpoint of a machine."""

    node: str
    progress: Progress


def shared_step(ours: Progress, theirs: Progress) -> int:
    """The last step that both surely share: a lineage in which both have been is one training up to where the first of
    them left it."""
    left_ours = {**dict(ours.history), ours.lineage: ours.step}
    left_theirs = {**dict(theirs.history), theirs.lineage: theirs.step}
    common = left_ours.keys() & left_theirs.keys()
    return max((min(left_ours[name], left_theirs[name]) for name in common), default=0)


def have_parted(ours: Progress, theirs: Progress) -> bool:
    """Both have steps that the other one lacks; who is merely behind can copy."""
    return shared_step(ours, theirs) < min(ours.step, theirs.step)


def choose(kept: Mapping[int, LocalCheckpoint], wanted: str = "") -> int:
    """The rank whose checkpoint all go on from: the furthest, of the lineage that was `wanted` if one was."""
    candidates = {rank: each for rank, each in kept.items() if not wanted or each.progress.lineage == wanted}
    if not candidates:
        lineages = sorted({each.progress.lineage for each in kept.values()})
        raise CheckpointError(
            f"no machine has a checkpoint of the lineage {wanted}" if kept else "no machine has a checkpoint",
            why=f"there are: {', '.join(lineages)}" if kept else "the run ended before its first one",
            fix="leave --lineage out, or name one of these" if kept else "start anew: shoal train … --out NEW_FOLDER",
        )
    if not wanted:
        for ours, theirs in combinations(candidates.values(), 2):
            if have_parted(ours.progress, theirs.progress):
                raise _two_trainings(ours, theirs)
    return max(candidates, key=lambda rank: (candidates[rank].progress.step, -rank))


def _two_trainings(ours: LocalCheckpoint, theirs: LocalCheckpoint) -> CheckpointError:
    further = max(ours, theirs, key=lambda each: each.progress.step)
    described = " and ".join(
        f"{each.node} has step {each.progress.step} of lineage {each.progress.lineage}" for each in (ours, theirs)
    )
    return CheckpointError(
        f"the machines have two trainings: {described}; they share {shared_step(ours.progress, theirs.progress)} steps",
        why="they trained apart while they could not hear each other, and never met again",
        fix=f"choose the one to go on with, the other is given up: --lineage {further.progress.lineage}",
    )


@dataclass(frozen=True)
class _Found:
    """What was found, as everybody knows it. `has_moments`: the inner optimizer's are common to all ranks."""

    progress: Progress
    has_moments: bool
    parts: RankShards | None


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest whole checkpoint of this machine, if this rank reads its files; and what was found damaged."""

    progress: Progress | None
    damaged: tuple[str, ...] = ()


def find_newest(world: World, recorder: Recorder, folder: CheckpointFolder) -> NewestCheckpoint:
    """Reads all bytes of a checkpoint, so it may take minutes on a slow disk. Warns of each damaged one."""
    damaged: list[str] = []

    def pass_over(error: CheckpointError) -> None:
        damaged.append(error.seen)
        recorder.warn(_passed_over(error))

    progress = folder.newest_whole(pass_over) if world.keeps_files else None
    return NewestCheckpoint(progress, tuple(damaged))


def resume(
    trainer: Trainer,
    folder: CheckpointFolder,
    reached: Callable[[int, bool], None],
    lineage: str,
    newest: NewestCheckpoint | None = None,
) -> Progress:
    """One rank's checkpoint is chosen, the furthest, and everybody copies what is common. `reached` is told which step
    it is of, and whether replicas had parted by then, before anything of it is loaded. `lineage` is the one to go on
    with, where machines trained apart. `newest`: what `find_newest` found, where it was called already."""
    # Ranks without files wait while the others read theirs.
    bear_with(trainer.world, WRITE_TIMEOUT_S)
    source, kept = _choose(trainer, folder, lineage, newest or find_newest(trainer.world, trainer.recorder, folder))
    checkpoint = folder.load_latest() if trainer.world.rank == source else None
    found = _tell(trainer.world, source, checkpoint)
    bear_with(trainer.world, exchange_timeout_s(trainer.config.sync, trainer.outer))
    chosen = kept[source].progress
    trainer.history = (*chosen.history, (chosen.lineage, found.progress.step))
    _give_up_others(trainer.world, folder, kept, chosen)
    reached(found.progress.step, not found.has_moments)
    if not found.has_moments and not trainer.config.sync.is_outer:
        raise _parted(found.progress.step)
    _load_common(trainer, source, checkpoint, found)
    if found.parts is None:
        return trainer.at(found.progress.step, found.progress.cursor)
    own, problem = _own_part(folder, found.progress.step, trainer.world.rank, found.parts)
    having = [rank for rank, [has_part] in enumerate(gather(trainer.world, [own is not None])) if has_part]
    if own is not None and found.parts.ranks == trainer.world.size == len(having):
        load_own_state(trainer, own, found.progress.step)
        return trainer.at(found.progress.step, found.progress.cursor)
    trainer.progress = _fall_back(trainer, found, own or {}, having, problem)
    Saver(trainer, folder, saved_step=-1).save(must=True)
    if trainer.world.keeps_files:
        folder.set_aside_newer(trainer.progress.step)
    return trainer.progress


def _choose(
    trainer: Trainer, folder: CheckpointFolder, wanted: str, newest: NewestCheckpoint
) -> tuple[int, dict[int, LocalCheckpoint]]:
    """By checkpoints whose sums are right: a damaged one must not hide another machine's good one."""
    world, progress = trainer.world, newest.progress
    own = {"node": world.node, "progress": asdict(progress) if progress else None, "damaged": newest.damaged}
    told = gather_documents(world, own)
    kept = {
        rank: LocalCheckpoint(each["node"], read_progress(each["progress"]))
        for rank, each in enumerate(told)
        if each["progress"]
    }
    if not kept:
        raise CheckpointError(
            f"no checkpoint to resume from in {folder.path}",
            why="; ".join(seen for each in told for seen in each["damaged"])
            or "the run ended before its first checkpoint",
            fix="start anew: shoal train … --out NEW_FOLDER",
        )
    return choose(kept, wanted), kept


def _give_up_others(world: World, folder: CheckpointFolder, kept: dict[int, LocalCheckpoint], chosen: Progress) -> None:
    """What this machine has trained apart from what was chosen would be resumed from next time."""
    ours = kept.get(world.rank)
    if ours is not None and have_parted(ours.progress, chosen):
        folder.set_aside_newer(shared_step(ours.progress, chosen))


def _tell(world: World, source: int, checkpoint: Checkpoint | None) -> _Found:
    numbers = [0] * 9
    if checkpoint is not None:
        progress, parts = checkpoint.progress, checkpoint.parts or RankShards(0, 0, 0, 0)
        numbers = [progress.step, progress.cursor, any(name.startswith("optimizer.") for name in checkpoint.optimizer)]
        numbers += [checkpoint.parts is not None, parts.ranks, parts.mark, parts.step, parts.cursor, parts.flying]
    step, cursor, has_moments, has_parts, *of_parts = tell_all(world, source, numbers)
    return _Found(Progress(step, cursor), bool(has_moments), RankShards(*of_parts) if has_parts else None)


def _passed_over(error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        error.seen,
        why="an older one is looked for; what was done since is done again",
        fix="look at the disk, if this is not the first time: dmesg | tail",
    )


def _parted(step: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} is of replicas that had parted, and this run exchanges gradients",
        why="sync.mode was another, or with sync.mode=auto the events that tell what was chosen are gone",
        fix="restore the run folder's events, or name the mode in its config.toml: shoal train --help",
    )


def _load_common(trainer: Trainer, source: int, checkpoint: Checkpoint | None, found: _Found) -> None:
    model, outer = trainer.model, trainer.outer
    if checkpoint is not None:
        load_weights(model, checkpoint.model)
    copy_from(trainer.world, source, weights(model).values())
    common_step, flying = (found.parts.step, found.parts.flying) if found.parts else (found.progress.step, 0)
    outer.rewind(common_step, flying)
    room = outer.state()
    if checkpoint is not None:
        fill(room, checkpoint.optimizer)
    copy_from(trainer.world, source, room.values())
    if found.has_moments:
        tensors = checkpoint.optimizer if checkpoint is not None else empty_moments(model)
        _share_moments(trainer, source, tensors, found.progress.step)


def _own_part(
    folder: CheckpointFolder, step: int, rank: int, parts: RankShards
) -> tuple[dict[str, Tensor] | None, CheckpointError | None]:
    try:
        return read_part(folder.folder(step), rank, parts.mark), None
    except CheckpointError as error:
        return None, error


def _fall_back(
    trainer: Trainer, found: _Found, own: dict[str, Tensor], having: list[int], problem: CheckpointError | None
) -> Progress:
    """Everybody goes on from what is common, with the moments of one rank: half a round would be half a training."""
    assert found.parts is not None  # noqa: S101 - whoever falls back has looked for a part
    goes_on = trainer.at(found.parts.step, found.parts.cursor)
    if not found.has_moments:
        donor = having[0] if having else 0
        tensors = own if trainer.world.rank in having else empty_moments(trainer.model)
        if not having:
            tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        _share_moments(trainer, donor, tensors, goes_on.step)
    if problem is not None or trainer.world.is_main:
        trainer.recorder.warn(_explain(found, goes_on, trainer.world, having, problem))
    return goes_on


def _share_moments(trainer: Trainer, source: int, tensors: dict[str, Tensor], step: int) -> None:
    load_moments(trainer.model, trainer.optimizer, tensors, step)
    copy_from(trainer.world, source, moments(trainer.model, trainer.optimizer).values())


def _explain(
    found: _Found, goes_on: Progress, world: World, having: list[int], problem: CheckpointError | None
) -> CheckpointError:
    parts = found.parts.ranks if found.parts else 0
    missing = [str(rank) for rank in range(min(parts, world.size)) if rank not in having]
    reasons = [f"it was saved by {parts} ranks, now there are {world.size}"] if parts != world.size else []
    reasons += [f"rank {', '.join(missing)} has no part of it"] if missing else []
    reasons += [problem.seen] if problem is not None else []
    return CheckpointError(
        f"the checkpoint of step {found.progress.step} cannot be resumed exactly: all ranks go on from what they had "
        f"in common at step {goes_on.step}",
        why="; ".join(reasons),
        fix="what was done since is done again; to go on exactly, resume with the same ranks on the same machines",
    )

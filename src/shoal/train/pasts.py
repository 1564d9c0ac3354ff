"""Whether the checkpoints that lie on a run's machines are of one training, and which of them to go on from. Pure.

Machines that trained apart, because they could not hear each other, and never met again each have a checkpoint of a
lineage of their own. To go on from one of them gives up what the other did, which nobody but the user can decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from shoal.errors import CheckpointError
from shoal.train.checkpoint import Progress


@dataclass(frozen=True)
class Kept:
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


def choose(kept: Mapping[int, Kept], wanted: str = "") -> int:
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


def _two_trainings(ours: Kept, theirs: Kept) -> CheckpointError:
    further = max(ours, theirs, key=lambda each: each.progress.step)
    described = " and ".join(
        f"{each.node} has step {each.progress.step} of lineage {each.progress.lineage}" for each in (ours, theirs)
    )
    return CheckpointError(
        f"the machines have two trainings: {described}; they share {shared_step(ours.progress, theirs.progress)} steps",
        why="they trained apart while they could not hear each other, and never met again",
        fix=f"choose the one to go on with, the other is given up: --lineage {further.progress.lineage}",
    )

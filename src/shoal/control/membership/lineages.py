"""Which of two lineages stays when they meet, and what both have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.control.membership.generation import Ballot, Lineage


def standing(lineages: Mapping[Ballot, int]) -> Ballot:
    """The lineage that stays, of those that meet with so many committed steps each. Of two with equally many, the one
    that parted later knew more of the other's absence; of two that parted at once, the lower proposer's. Everybody who
    knows the same figures comes to the same answer."""
    return max(lineages, key=lambda name: (lineages[name], name.number, -name.proposer))


def shared_step(ours: Lineage, theirs: Lineage) -> int:
    """The last step that both surely share; 0 where the common past lies too far back to tell."""
    left_ours = {fork.lineage: fork.step for fork in ours.forks}
    left_theirs = {fork.lineage: fork.step for fork in theirs.forks}
    for name in (ours.name, *reversed(left_ours)):
        if name == theirs.name or name in left_theirs:
            return min(steps) if (steps := [left[name] for left in (left_ours, left_theirs) if name in left]) else 0
    return 0

"""Ballots, generations and lineages, as messages and files carry them.

A generation is a fixed set of members that trains from a stated state; every change of membership makes the next one. A
lineage is a sequence of generations of which each is the only successor of the one before. Both are identified by the
ballot under which they were first proposed, which no two proposals share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

MAX_MEMBERS = 64
MAX_RANKS_PER_MEMBER = 64
MAX_FORKS = 64

Member = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Ranks = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**16)], ...], Field(max_length=MAX_RANKS_PER_MEMBER)]


class Ballot(NamedTuple):
    """Identifies one proposal forever: a member never uses a number twice."""

    number: Count
    proposer: Member

    def __str__(self) -> str:
        return f"{self.number}-{self.proposer}"


NEVER = Ballot(0, 0)


def read_ballot(text: str) -> Ballot:
    """Read `7-2`; `7` alone is of a run whose ranks cannot change."""
    number, _, proposer = text.partition("-")
    return Ballot(int(number), int(proposer or 0))


class StrictModel(BaseModel):
    """An immutable model that converts nothing and refuses unknown fields: its values come from other processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class State(StrictModel):
    """The state of a member's replica."""

    step: Count  # the last step it has applied
    committed: Count = 0  # the last step it knows to be committed


class MemberRanks(StrictModel):
    """A member of a generation and the local numbers of its ranks."""

    member: Member
    ranks: Ranks


class LineageFork(StrictModel):
    """Where a lineage branched off another one."""

    lineage: Ballot
    generation: Ballot  # the last common generation
    step: Count  # the last step that both certainly share
    restarts: bool = False  # the state was lost: the lineage began with a checkpoint


class Lineage(StrictModel):
    name: Ballot
    # From the run's first lineage to this one; only the newest are kept.
    forks: Annotated[tuple[LineageFork, ...], Field(max_length=MAX_FORKS)] = ()

    def branch(self, name: Ballot, generation: Ballot, step: int) -> Lineage:
        fork = LineageFork(lineage=self.name, generation=generation, step=step)
        return Lineage(name=name, forks=(*self.forks, fork)[-MAX_FORKS:])

    def restart(self, name: Ballot, generation: Ballot) -> Lineage:
        """Return a lineage that goes back to a checkpoint.

        Agents know neither the step nor the lineage of that checkpoint, so every shared step is 0 until the ranks have
        loaded it (`with_shared_steps`): too few shared steps are safe, too many are not.
        """
        *earlier, last = self.branch(name, generation, 0).forks
        forks = (*(fork.model_copy(update={"step": 0}) for fork in earlier), last.model_copy(update={"restarts": True}))
        return Lineage(name=name, forks=forks)

    def with_shared_steps(self, left: Mapping[Ballot, int]) -> Lineage:
        """Return this lineage as its ranks know it: `left` has the step after which it left each earlier lineage."""
        if not any(fork.restarts for fork in self.forks):
            return self
        forks = (fork.model_copy(update={"step": max(fork.step, left.get(fork.lineage, 0))}) for fork in self.forks)
        return Lineage(name=self.name, forks=tuple(forks))


class Generation(StrictModel):
    id: Ballot
    lineage: Lineage
    parent: Ballot = NEVER
    member_ranks: Annotated[tuple[MemberRanks, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    state: State  # all members begin with it
    source: Member  # a member with another state copies it from here
    recovers: bool = False  # no member has a state: all begin with the newest checkpoint that one of them finds

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(entry.member for entry in self.member_ranks)

    @property
    def world_size(self) -> int:
        return sum(len(entry.ranks) for entry in self.member_ranks)

    def ranks_of(self, member: int) -> tuple[int, ...]:
        return self.member_ranks[self.members.index(member)].ranks

    def first_rank(self, member: int) -> int:
        """Return the global rank of a member's first local rank; its others follow."""
        return sum(len(entry.ranks) for entry in self.member_ranks[: self.members.index(member)])


def first_generation(
    member_ranks: tuple[MemberRanks, ...],
    state: State | None = None,
    after: Generation | None = None,
    above: int = 0,
) -> Generation:
    """Return the first generation of a launch.

    A resumed run passes the generation of its checkpoint (`after`), so that its lineage branches off there, and the
    highest number in its ledger (`above`), so that no number is used twice.
    """
    first = min(entry.member for entry in member_ranks)
    start = state or State(step=0)
    ballot = Ballot(max(above, after.id.number if after else 0) + 1, first)
    lineage = after.lineage.branch(ballot, after.id, start.committed) if after else Lineage(name=ballot)
    return Generation(id=ballot, lineage=lineage, member_ranks=member_ranks, state=start, source=first)


def next_member(launch_size: int, inviter: int, invited: int) -> int:
    """Return the id of the `invited`-th node (from 0) that member `inviter` admits, without asking other members.

    Cantor's pairing function maps every pair to its own number, so two members never give out the same id, even when
    they cannot reach each other. The launch uses the ids below `launch_size`.
    """
    diagonal = inviter + invited
    return launch_size + diagonal * (diagonal + 1) // 2 + invited


def choose_lineage(committed_steps: Mapping[Ballot, int]) -> Ballot:
    """Return the lineage that stays when several meet: the one with most committed steps.

    Of two with equally many, the younger one, because it knew more of the other's absence; of two that forked at once,
    the lower proposer's. All agents that know the same figures choose the same.
    """
    return max(committed_steps, key=lambda name: (committed_steps[name], name.number, -name.proposer))


def has_restarted(lineage: Lineage, since: Ballot) -> bool:
    """Whether the lineage went back to a checkpoint when it left the lineage `since`, or later."""
    names = [fork.lineage for fork in lineage.forks]
    return since in names and any(fork.restarts for fork in lineage.forks[names.index(since) :])


def shared_step(one: Lineage, other: Lineage) -> int:
    """Return the last step that both lineages certainly share; 0 where their forks are no longer recorded."""
    one_forks = {fork.lineage: fork.step for fork in one.forks}
    other_forks = {fork.lineage: fork.step for fork in other.forks}
    for name in (one.name, *reversed(one_forks)):
        if name == other.name or name in other_forks:
            return min((forks[name] for forks in (one_forks, other_forks) if name in forks), default=0)
    return 0

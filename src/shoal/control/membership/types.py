"""Generations and lineages: the nouns of membership, as messages and files carry them.

A generation is a fixed set of members that trains from a stated state; each change of membership makes the next one.
A lineage is a line of generations in which nobody else can have gone on at the same time. Both are known by the ballot
under which they were first proposed, which no two proposals share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

MOST_MEMBERS = 64
MOST_RANKS = 64
MOST_FORKS = 64

Member = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Digest = Annotated[str, Field(max_length=128, pattern=r"^[0-9a-f]*$")]
Ranks = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**16)], ...], Field(max_length=MOST_RANKS)]


class Ballot(NamedTuple):
    """One proposal's own number. A member never uses a number again, so a ballot names one proposal for ever."""

    number: Count
    proposer: Member

    def __str__(self) -> str:
        return f"{self.number}-{self.proposer}"


NEVER = Ballot(0, 0)


def read_ballot(text: str) -> Ballot:
    number, _, proposer = text.partition("-")
    return Ballot(int(number), int(proposer))


class StrictModel(BaseModel):
    """Immutable, and strict about what comes from outside: nothing is converted, nothing unknown is passed over."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class State(StrictModel):
    """Where a member's replica stands: the last step it has applied, its digest, and the last step it knows to be
    committed. An empty digest is one that nobody has computed."""

    step: Count
    digest: Digest = ""
    committed: Count = 0


class MemberRanks(StrictModel):
    """A member of a generation, with the local numbers of the ranks it brings."""

    member: Member
    ranks: Ranks


class LineageFork(StrictModel):
    """Where a lineage left another one: after which generation of it, and the last step that both surely share."""

    lineage: Ballot
    generation: Ballot
    step: Count


class Lineage(StrictModel):
    """`forks` leads from the run's first lineage to this one; only the newest are kept."""

    name: Ballot
    forks: Annotated[tuple[LineageFork, ...], Field(max_length=MOST_FORKS)] = ()

    def branch(self, name: Ballot, generation: Ballot, step: int) -> Lineage:
        fork = LineageFork(lineage=self.name, generation=generation, step=step)
        return Lineage(name=name, forks=(*self.forks, fork)[-MOST_FORKS:])

    def restart(self, name: Ballot, generation: Ballot) -> Lineage:
        """A lineage that goes back to a checkpoint. Agents don't know of which step that is, nor of which lineage: what
        it surely shares with each earlier one is nothing, which is never too much."""
        branched = self.branch(name, generation, 0)
        return Lineage(name=name, forks=tuple(fork.model_copy(update={"step": 0}) for fork in branched.forks))


class Generation(StrictModel):
    """`state` is what all members begin with; a member with another one copies it from `source`. `recovers`: no member
    has a state, and all begin with the newest checkpoint that one of them finds."""

    id: Ballot
    lineage: Lineage
    parent: Ballot = NEVER
    seats: Annotated[tuple[MemberRanks, ...], Field(min_length=1, max_length=MOST_MEMBERS)]
    state: State
    source: Member
    recovers: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(seat.member for seat in self.seats)

    @property
    def world_size(self) -> int:
        return sum(len(seat.ranks) for seat in self.seats)

    def ranks_of(self, member: int) -> tuple[int, ...]:
        return self.seats[self.members.index(member)].ranks

    def first_rank(self, member: int) -> int:
        """The global rank of a member's first local rank; its others follow."""
        before = self.seats[: self.members.index(member)]
        return sum(len(seat.ranks) for seat in before)


def founding(
    seats: tuple[MemberRanks, ...], state: State | None = None, after: Generation | None = None, above: int = 0
) -> Generation:
    """The first generation of a launch. A resumed run says which one its checkpoint came from, so that its lineage is
    known to branch off there, and the highest number in its ledger (`above`), so that none is used again."""
    first = min(seat.member for seat in seats)
    start = state or State(step=0)
    ballot = Ballot(max(above, after.id.number if after else 0) + 1, first)
    lineage = after.lineage.branch(ballot, after.id, start.committed) if after else Lineage(name=ballot)
    return Generation(id=ballot, lineage=lineage, seats=seats, state=start, source=first)


def next_member(founders: int, sponsor: int, invited: int) -> int:
    """The id of a new machine that `sponsor` lets in as its `invited`-th guest (from 0), without asking anybody.

    Cantor's pairing gives every pair a number of its own, so no two sponsors ever hand out the same id, not even when
    they cannot talk to each other.
    """
    along = sponsor + invited
    return founders + along * (along + 1) // 2 + invited


# SECTION control/membership/lineages
# Which of two lineages stays when they meet, and what both have in common. Pure.


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

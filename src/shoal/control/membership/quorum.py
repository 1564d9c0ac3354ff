"""Decide from votes and promises whether members may continue, in which lineage and from which state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from shoal.control.membership.messages import Promise
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import Ballot, Generation, MemberRanks, Ranks, State


class QuorumVerdict(Enum):
    CONTINUE = "continue"  # no other side can continue in this lineage
    FORK = "fork"  # another side might continue, so this one becomes a lineage of its own
    PAUSE = "pause"  # the other side has the better right to continue, or no member has the state


@dataclass(frozen=True)
class Quorum:
    """The members that vote on the successor of a generation, as one proposer sees them."""

    members: frozenset[int]
    resigned: frozenset[int] = frozenset()  # gave up their vote themselves, so it can never be cast elsewhere
    away: frozenset[int] = frozenset()  # seem gone: enough to continue without them, but they may continue too
    closed: bool = False  # the lineage has a successor already, so this side cannot continue it

    @property
    def voters(self) -> frozenset[int]:
        return self.members - self.resigned

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1


def judge(quorum: Quorum, votes: frozenset[int], on_silent_tie: str) -> QuorumVerdict:
    cast = votes & quorum.voters
    if len(cast) >= quorum.majority:
        return QuorumVerdict.FORK if quorum.closed else QuorumVerdict.CONTINUE
    remaining = quorum.voters - (quorum.away - cast)
    if 2 * len(cast) > len(remaining):
        return QuorumVerdict.FORK
    if cast and 2 * len(cast) == len(remaining) and on_silent_tie == "continue":
        return QuorumVerdict.FORK
    return QuorumVerdict.PAUSE


def mutually_reachable(reachable: Mapping[int, Iterable[int]]) -> frozenset[int]:
    """Return members that all reach each other, because gloo connects every rank with every other.

    Removes the member with most missing links first; of several, the one with the highest id.
    """
    links = {member: set(peers) for member, peers in reachable.items()}
    left = set(links)
    while left:
        missing = {
            member: sum(1 for other in left - {member} if other not in links[member] or member not in links[other])
            for member in left
        }
        worst = max(left, key=lambda member: (missing[member], member))
        if not missing[worst]:
            break
        left.discard(worst)
    return frozenset(left)


@dataclass(frozen=True)
class JoinCandidate:
    """A node outside the generation that asks to join."""

    ranks: Ranks
    reachable: tuple[int, ...]


@dataclass(frozen=True)
class QuorumDecision:
    """What a proposer concludes from its promises."""

    verdict: QuorumVerdict
    successor: Generation | None = None  # None: pause
    voters: frozenset[int] = frozenset()  # whose acceptance decides the successor
    majority: int = 0  # how many of them must accept
    why: str = ""  # the reason of a pause
    gives_up_vote: bool = False  # a pause until enough nodes are there to go back to a checkpoint


def decide_successor(
    base: Generation,
    ballot: Ballot,
    quorum: Quorum,
    promises: Mapping[int, Promise],
    candidates: Mapping[int, JoinCandidate],
    settings: MembershipSettings,
    gives_up_state: bool = False,
) -> QuorumDecision:
    """Decide what follows `base`.

    `gives_up_state`: members that did not answer have had their time to come back with the state.
    """
    members = _choose_members(promises, candidates, settings)
    staying = frozenset(entry.member for entry in members) & promises.keys()
    verdict = judge(quorum, frozenset(promises), settings.on_silent_tie)
    if verdict is not QuorumVerdict.CONTINUE:
        verdict = judge(quorum, staying, settings.on_silent_tie)
    if verdict is QuorumVerdict.PAUSE:
        return QuorumDecision(verdict, why="minority")
    best = _choose_source(base, {member: promises[member] for member in staying})
    if best is None and not gives_up_state and quorum.voters - quorum.away - promises.keys():
        return QuorumDecision(QuorumVerdict.PAUSE, why="no state")
    if len(members) < settings.min_nodes:
        # Nodes join only a lineage that has a state: where it is lost, a vote would keep all from recovering together.
        return QuorumDecision(QuorumVerdict.PAUSE, why="min_nodes", gives_up_vote=best is None)
    if best is None:
        return QuorumDecision(QuorumVerdict.FORK, recovery_generation(base, ballot, members), staying, len(staying))
    source, state = best
    committed = max(promise.state.committed for promise in promises.values() if promise.state)
    is_fork = verdict is QuorumVerdict.FORK
    successor = Generation(
        id=ballot,
        lineage=base.lineage.branch(ballot, base.id, committed) if is_fork else base.lineage,
        parent=base.id,
        member_ranks=members,
        state=State(step=state.step, committed=committed),
        source=source,
    )
    if is_fork:
        return QuorumDecision(verdict, successor, staying, len(staying))
    return QuorumDecision(verdict, successor, quorum.voters, quorum.majority)


def recovery_generation(base: Generation, ballot: Ballot, members: tuple[MemberRanks, ...]) -> Generation:
    """Return what follows when the state is lost: a lineage of its own, because committed steps are repeated."""
    return Generation(
        id=ballot,
        lineage=base.lineage.restart(ballot, base.id),
        parent=base.id,
        member_ranks=members,
        state=State(step=0),
        source=members[0].member,
        recovers=True,
    )


def fit_members(first: int, ready: Mapping[int, Ranks], settings: MembershipSettings) -> tuple[MemberRanks, ...]:
    """Return `first` and as many of the others, lowest first, as the limits allow; none if `first` does not fit."""
    chosen: list[int] = []
    for member in sorted(ready, key=lambda member: (member != first, member)):
        rank_count = sum(len(ready[other]) for other in (*chosen, member))
        if len(chosen) < settings.max_nodes and rank_count <= settings.max_ranks:
            chosen.append(member)
    if first not in chosen:
        return ()
    return tuple(MemberRanks(member=member, ranks=ready[member]) for member in sorted(chosen))


def _choose_members(
    promises: Mapping[int, Promise], candidates: Mapping[int, JoinCandidate], settings: MembershipSettings
) -> tuple[MemberRanks, ...]:
    """Keep the present members; admit candidates while there is room."""
    ranks = {member: promise.ranks for member, promise in promises.items() if promise.ranks}
    chosen = mutually_reachable({member: promises[member].reachable for member in ranks})
    for member, candidate in sorted(candidates.items()):
        links = {other: promises[other].reachable for other in chosen if other in promises}
        links |= {other: candidates[other].reachable for other in (*chosen, member) if other in candidates}
        has_room = len(chosen) < settings.max_nodes
        has_room &= sum(len(ranks[other]) for other in chosen) + len(candidate.ranks) <= settings.max_ranks
        if has_room and len(mutually_reachable(links)) == len(links):
            chosen |= {member}
            ranks[member] = candidate.ranks
    return tuple(MemberRanks(member=member, ranks=ranks[member]) for member in sorted(chosen))


def _choose_source(base: Generation, promises: Mapping[int, Promise]) -> tuple[int, State] | None:
    """Return the replica that is furthest; of several the one of the lowest member.

    Agents do not know the contents of a replica. The ranks compare digests when they have formed the group, and copy
    the state that most of them have (`train/state_transfer.py`).
    """
    usable = {
        member: promise.state
        for member, promise in promises.items()
        if promise.state and promise.state.step >= base.state.committed
    }
    if not usable:
        return None
    source = min(usable, key=lambda member: (-usable[member].step, member))
    return source, usable[source]

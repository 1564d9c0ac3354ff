"""May these members go on, as what, and from where? The rule of succession. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from shoal.control.membership.messages import Promise
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import Ballot, Generation, MemberRanks, Ranks, State


class QuorumVerdict(Enum):
    """`CONTINUE`: nobody else can go on in this lineage. `FORK`: somebody might, so this becomes a lineage of its own.
    `PAUSE`: others have the better right to go on, or nobody has the state."""

    CONTINUE = "continue"
    FORK = "fork"
    PAUSE = "pause"


@dataclass(frozen=True)
class Quorum:
    """The last generation, seen by one who wants to follow it. `resigned` gave their vote up by their own word, so it
    can never be cast elsewhere. `away` are gone by other signs: enough to go on without them, but no proof that they
    don't go on themselves. `closed`: the lineage has gone on already, so that nobody else can continue it."""

    members: frozenset[int]
    resigned: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()
    closed: bool = False

    @property
    def voters(self) -> frozenset[int]:
        return self.members - self.resigned

    @property
    def quorum(self) -> int:
        return len(self.voters) // 2 + 1


def judge(electorate: Quorum, votes: frozenset[int], on_silent_tie: str) -> QuorumVerdict:
    cast = votes & electorate.voters
    if len(cast) >= electorate.quorum:
        return QuorumVerdict.FORK if electorate.closed else QuorumVerdict.CONTINUE
    rest = electorate.voters - (electorate.away - cast)
    if 2 * len(cast) > len(rest):
        return QuorumVerdict.FORK
    if cast and 2 * len(cast) == len(rest) and on_silent_tie == "continue":
        return QuorumVerdict.FORK
    return QuorumVerdict.PAUSE


def mutual(hears: Mapping[int, Iterable[int]]) -> frozenset[int]:
    """Members that all hear each other: gloo connects everybody with everybody. Whoever misses most is left out first,
    of several the one with the highest id."""
    sets = {member: set(heard) for member, heard in hears.items()}
    left = set(sets)
    while left:
        missing = {
            member: sum(1 for other in left - {member} if other not in sets[member] or member not in sets[other])
            for member in left
        }
        worst = max(left, key=lambda member: (missing[member], member))
        if not missing[worst]:
            break
        left.discard(worst)
    return frozenset(left)


@dataclass(frozen=True)
class JoinCandidate:
    """Somebody outside the generation who asks to be let in."""

    ranks: Ranks
    hears: tuple[int, ...]


@dataclass(frozen=True)
class QuorumDecision:
    """What a proposer makes of the promises it has: a verdict, and unless that is to pause, a successor with those
    whose acceptance decides it."""

    verdict: QuorumVerdict
    successor: Generation | None = None
    electors: frozenset[int] = frozenset()
    quorum: int = 0
    why: str = ""


def succeed(
    base: Generation,
    ballot: Ballot,
    electorate: Quorum,
    promises: Mapping[int, Promise],
    guests: Mapping[int, JoinCandidate],
    rules: MembershipSettings,
    gives_up_state: bool = False,
) -> QuorumDecision:
    """`gives_up_state`: members that did not answer have had their time to come back with the state."""
    seats = _seats(base, promises, guests, rules)
    stay = frozenset(seat.member for seat in seats) & promises.keys()
    verdict = judge(electorate, frozenset(promises), rules.on_silent_tie)
    if verdict is not QuorumVerdict.CONTINUE:
        verdict = judge(electorate, stay, rules.on_silent_tie)
    if verdict is QuorumVerdict.PAUSE:
        return QuorumDecision(verdict, why="minority")
    if len(seats) < rules.min_nodes:
        return QuorumDecision(QuorumVerdict.PAUSE, why="min_nodes")
    best = _best(base, {member: promises[member] for member in stay})
    if best is None:
        if not gives_up_state and electorate.voters - electorate.away - promises.keys():
            return QuorumDecision(QuorumVerdict.PAUSE, why="no state")
        return QuorumDecision(QuorumVerdict.FORK, recover(base, ballot, seats), stay, len(stay))
    committed = max(promise.state.committed for promise in promises.values() if promise.state)
    successor = _generation(base, ballot, verdict, seats, best, committed)
    if verdict is QuorumVerdict.CONTINUE:
        return QuorumDecision(verdict, successor, electorate.voters, electorate.quorum)
    return QuorumDecision(verdict, successor, stay, len(stay))


def recover(base: Generation, ballot: Ballot, seats: tuple[MemberRanks, ...]) -> Generation:
    """What follows when the state is lost: a lineage of its own, since committed steps are done again."""
    return Generation(
        id=ballot,
        lineage=base.lineage.restart(ballot, base.id),
        parent=base.id,
        seats=seats,
        state=State(step=0),
        source=seats[0].member,
        recovers=True,
    )


def fitting_seats(first: int, ready: Mapping[int, Ranks], rules: MembershipSettings) -> tuple[MemberRanks, ...]:
    """`first` and as many of the others, lowest first, as the limits of nodes and ranks allow; none without `first`."""
    inside: list[int] = []
    for member in sorted(ready, key=lambda member: (member != first, member)):
        ranks = sum(len(ready[known]) for known in (*inside, member))
        if len(inside) < rules.max_nodes and ranks <= rules.most_ranks:
            inside.append(member)
    if first not in inside:
        return ()
    return tuple(MemberRanks(member=member, ranks=ready[member]) for member in sorted(inside))


def _seats(
    base: Generation, promises: Mapping[int, Promise], guests: Mapping[int, JoinCandidate], rules: MembershipSettings
) -> tuple[MemberRanks, ...]:
    """Who was in stays in; guests come in where there is room."""
    brings = {member: promise.ranks for member, promise in promises.items() if promise.ranks}
    inside = mutual({member: promises[member].hears for member in brings})
    for member in sorted(guests):
        wider = {known: promises[known].hears for known in inside if known in promises}
        wider |= {known: guests[known].hears for known in (*inside, member) if known in guests}
        room = len(inside) < rules.max_nodes
        room &= sum(len(brings[known]) for known in inside) + len(guests[member].ranks) <= rules.most_ranks
        if room and len(mutual(wider)) == len(wider):
            inside |= {member}
            brings[member] = guests[member].ranks
    return tuple(MemberRanks(member=member, ranks=brings[member]) for member in sorted(inside))


def _best(base: Generation, promises: Mapping[int, Promise]) -> tuple[int, State] | None:
    """The replica that is furthest; of several digests at that step the most frequent one, of the lowest member."""
    able = {
        member: promise.state
        for member, promise in promises.items()
        if promise.state and promise.state.step >= base.state.committed
    }
    if not able:
        return None
    step = max(state.step for state in able.values())
    ahead = {member: state for member, state in able.items() if state.step == step}
    votes = Counter(state.digest for state in ahead.values())
    source = min(ahead, key=lambda member: (-votes[ahead[member].digest], member))
    return source, ahead[source]


def _generation(
    base: Generation,
    ballot: Ballot,
    verdict: QuorumVerdict,
    seats: tuple[MemberRanks, ...],
    best: tuple[int, State],
    committed: int,
) -> Generation:
    source, state = best
    forked = verdict is QuorumVerdict.FORK
    return Generation(
        id=ballot,
        lineage=base.lineage.branch(ballot, base.id, committed) if forked else base.lineage,
        parent=base.id,
        seats=seats,
        state=State(step=state.step, digest=state.digest, committed=committed),
        source=source,
    )

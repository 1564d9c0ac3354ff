"""Who is here, silent or gone, by what we heard and when. The clock is handed in: CLOCK_BOOTTIME in production."""

from __future__ import annotations

from enum import Enum

from shoal.control.membership.messages import Heartbeat, Resign
from shoal.control.membership.quorum import JoinCandidate, Quorum
from shoal.control.membership.sentences import Cause
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import Ballot, Generation, standing


class PeerStatus(Enum):
    """`GONE`: its agent's connection closed right after a heartbeat; that it said so itself is known elsewhere.
    `SILENT`: nothing was heard, which a cable, a closed lid and a long pause all look like."""

    HERE = "here"
    SILENT = "silent"
    GONE = "gone"


class FailureDetector:
    def __init__(self, rules: MembershipSettings, now: float) -> None:
        self._rules = rules
        self._now = now
        # As if we had always been awake: nothing has happened yet that we could have missed.
        self._awake_since = now - rules.silent_after_s
        self._heard_at: dict[int, float] = {}
        self._gone: set[int] = set()

    def note(self, now: float) -> bool:
        """Every input begins with this; whether we have just woken up. After a gap in our own time we know nothing of
        the others: everybody gets a fresh grace, or a woken machine would take its live peers for silent ones."""
        was_away = now - self._now > self._rules.away_after_s
        if was_away:
            self._awake_since = now
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._now = now
        return was_away

    def awake_s(self) -> float:
        """What arrives right after waking was said while we slept."""
        return self._now - self._awake_since

    def expect(self, member: int) -> None:
        """Its time to be heard of begins now, unless we heard of it before."""
        self._heard_at.setdefault(member, self._now)

    def heard(self, member: int) -> None:
        self._heard_at[member] = self._now
        self._gone.discard(member)

    def closed(self, member: int) -> None:
        """Only a closing right after a heartbeat proves anything, and not to somebody who has just woken up: peers that
        gave it up closed their connections while it slept, and are all alive."""
        heard_at = self._heard_at.get(member, float("-inf"))
        settled = self.awake_s() >= self._rules.silent_after_s
        if settled and self._now - heard_at <= self._rules.closed_within_s:
            self._gone.add(member)

    def standing(self, member: int) -> PeerStatus:
        if member in self._gone:
            return PeerStatus.GONE
        heard_at = self._heard_at.get(member)
        if heard_at is None or self._now - heard_at > self._rules.silent_after_s:
            return PeerStatus.SILENT
        return PeerStatus.HERE

    def silent_s(self, member: int) -> float:
        return self._now - self._heard_at.get(member, self._now)


# SECTION control/membership/view
# What one agent knows of the others: whom it hears, what they said last, who gave up a vote.


class PeerReports:
    def __init__(self, me: int, rules: MembershipSettings, now: float) -> None:
        self.me = me
        self.watch = FailureDetector(rules, now)
        self.linked: set[int] = set()
        self.beats: dict[int, Heartbeat] = {}
        self.resignations: dict[tuple[int, Ballot], Resign] = {}
        self.generations: dict[int, Generation] = {}

    def forget_before(self, generation: Ballot) -> None:
        """Votes on what followed older generations than ours are of no use any more."""
        self.resignations = {key: word for key, word in self.resignations.items() if key[1] >= generation}

    def hears(self) -> tuple[int, ...]:
        return tuple(member for member in sorted(self.linked) if self.watch.standing(member) is PeerStatus.HERE)

    def usable(self, member: int) -> bool:
        """We hear each other. Who does not hear us will form no group with us, whatever we hear of it."""
        if member == self.me:
            return True
        beat = self.beats.get(member)
        heard = member in self.linked and self.watch.standing(member) is PeerStatus.HERE
        return heard and (beat is None or self.me in beat.hears)

    def has_resigned(self, member: int, generation: Generation) -> bool:
        return (member, generation.id) in self.resignations

    def has_lost_state(self, member: int, generation: Generation) -> bool:
        """By its own word, its connection's end, or because it came back without: not merely because it is silent."""
        if self.watch.standing(member) is PeerStatus.GONE or self.has_resigned(member, generation):
            return True
        beat = self.beats.get(member)
        heard = self.watch.standing(member) is PeerStatus.HERE
        return heard and beat is not None and not (beat.votes and beat.holds)

    def is_elsewhere(self, member: int, generation: Generation) -> bool:
        """It is in another generation by now, or belongs to none any more."""
        beat = self.beats.get(member)
        return beat is not None and (beat.generation != generation.id or not beat.votes)

    def electorate(self, generation: Generation, passed: Generation | None = None) -> Quorum:
        """`passed`: a successor that has no seat for us and whose members have lost what they had, as far as is known;
        those of whom it is not known count against us."""
        inside = frozenset(passed.members) if passed else frozenset()
        members = inside.union(generation.members)
        resigned = {member for member in members - inside if self.has_resigned(member, generation)}
        away = {member for member in members - {self.me} if self._is_away(member, generation)}
        return Quorum(members, frozenset(resigned), frozenset(away), closed=passed is not None)

    def guests(self, generation: Generation) -> dict[int, JoinCandidate]:
        """Those who ask to be let in and bring ranks; members that have resigned may come back this way."""
        asking = {
            member: beat
            for member, beat in self.beats.items()
            if beat.asks == generation.lineage.name and beat.ranks and self.usable(member)
        }
        return {
            member: JoinCandidate(beat.ranks, beat.hears)
            for member, beat in asking.items()
            if member not in generation.members or self.is_elsewhere(member, generation)
        }

    def welcome(self, generation: Generation, present: list[int], room: int) -> bool:
        """Whether a guest could come in now, with its ranks: everybody present hears it, and it hears everybody."""
        return any(
            len(guest.ranks) <= room
            and all(other == self.me or member in self.beats[other].hears for other in present if other in self.beats)
            and set(present) <= set(guest.hears)
            for member, guest in self.guests(generation).items()
        )

    def best_lineage(self, mine: Generation | None, committed: int) -> Ballot | None:
        """The lineage that should stand, of those whose members we could all reach, and of our own."""
        reach = [
            beat
            for member, beat in self.beats.items()
            if beat.votes and beat.holds and self.usable(member) and (mine is None or self._reaches_all(member, mine))
        ]
        known: dict[Ballot, int] = {} if mine is None else {mine.lineage.name: committed}
        for beat in reach:
            if beat.lineage is not None:
                known[beat.lineage] = max(known.get(beat.lineage, 0), beat.committed)
        return standing(known) if known else None

    def is_overtaken(self, mine: Generation) -> bool:
        """Our lineage has gone on without us, and whoever did so can be heard. That it was told of a successor that
        has us in it only means that the same news is on its way to us."""
        return any(
            later.lineage.name == mine.lineage.name and later.id > mine.id and self.me not in later.members
            for member in self.hears()
            if (later := self._generation_of(member)) is not None
        )

    def cause(self, member: int, generation: Generation) -> Cause:
        if self.has_resigned(member, generation):
            return self.resignations[member, generation.id].why
        if self.watch.standing(member) is PeerStatus.GONE:
            return "closed"
        if self.watch.standing(member) is PeerStatus.HERE and self.is_elsewhere(member, generation):
            return "elsewhere"
        return "silent"

    def _reaches_all(self, member: int, mine: Generation) -> bool:
        """To stop our own training for a lineage that could not take us in would help nobody."""
        if self.beats[member].lineage == mine.lineage.name:
            return True
        theirs = self._generation_of(member)
        return theirs is not None and all(map(self.usable, theirs.members))

    def _generation_of(self, member: int) -> Generation | None:
        """The one whose state it has and may vote in, if it has told us what that is."""
        beat, told = self.beats.get(member), self.generations.get(member)
        return told if beat and told and beat.votes and beat.holds and told.id == beat.generation else None

    def _is_away(self, member: int, generation: Generation) -> bool:
        """Its connection closed; or it went on, or belongs to no generation any more, and has lost what it had."""
        if self.watch.standing(member) is PeerStatus.GONE:
            return True
        beat = self.beats.get(member)
        empty_handed = beat is not None and not (beat.holds and beat.votes)
        return empty_handed and self.is_elsewhere(member, generation)

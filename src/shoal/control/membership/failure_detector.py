"""Which peers are alive, silent or gone, and what each of them reported last.

The caller passes the time: CLOCK_BOOTTIME in production, which also counts while the machine sleeps.
"""

from __future__ import annotations

from enum import Enum

from shoal.control.membership.messages import Heartbeat, Resign
from shoal.control.membership.quorum import JoinCandidate, Quorum
from shoal.control.membership.sentences import Cause
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import Ballot, Generation, choose_lineage


class PeerStatus(Enum):
    ALIVE = "alive"
    SILENT = "silent"  # no message for `silent_after_s`: a pulled cable, a closed lid and a long pause look the same
    GONE = "gone"  # its connection closed right after a message: its agent has ended


class FailureDetector:
    def __init__(self, settings: MembershipSettings, now: float) -> None:
        self._settings = settings
        self._silent_after_s = settings.silent_after_s
        self._now = now
        # As if this node had always been awake: it cannot have missed anything yet.
        self._awake_since = now - settings.silent_after_s
        self._received_at: dict[int, float] = {}
        self._gone: set[int] = set()

    def advance(self, now: float) -> bool:
        """Set the time, before every input; return whether this node has just woken up.

        After a gap in this machine's time every peer gets a new grace period: otherwise a woken machine would suspect
        all its live peers.
        """
        has_slept = now - self._now > self._settings.slept_after_s
        if has_slept:
            self._awake_since = now
            self._received_at = dict.fromkeys(self._received_at, now)
        self._now = now
        return has_slept

    def set_starting(self, is_starting: bool) -> None:
        """While the ranks of a launch start, be patient with silent members."""
        usual_s, starting_s = self._settings.silent_after_s, self._settings.starting_silent_after_s
        self._silent_after_s = max(usual_s, starting_s) if is_starting else usual_s

    def awake_s(self) -> float:
        """Return the time since waking. A message that arrives right after waking was sent while this machine slept."""
        return self._now - self._awake_since

    def expect(self, member: int) -> None:
        """Start the grace period of a member that has sent nothing yet."""
        self._received_at.setdefault(member, self._now)

    def record_message(self, member: int) -> None:
        self._received_at[member] = self._now
        self._gone.discard(member)

    def record_close(self, member: int) -> None:
        """Record that the member's connection closed.

        Only a close right after a message proves that its agent ended, and not to a node that has just woken up: while
        it slept, live peers gave it up and closed their connections.
        """
        received_at = self._received_at.get(member, float("-inf"))
        is_settled = self.awake_s() >= self._settings.silent_after_s
        if is_settled and self._now - received_at <= self._settings.closed_within_s:
            self._gone.add(member)

    def status(self, member: int) -> PeerStatus:
        if member in self._gone:
            return PeerStatus.GONE
        received_at = self._received_at.get(member)
        if received_at is None or self._now - received_at > self._silent_after_s:
            return PeerStatus.SILENT
        return PeerStatus.ALIVE

    def silent_s(self, member: int) -> float:
        return self._now - self._received_at.get(member, self._now)


class PeerReports:
    """What one agent knows of its peers: who is reachable, their last heartbeats, and who resigned."""

    def __init__(self, me: int, settings: MembershipSettings, now: float) -> None:
        self.me = me
        self.detector = FailureDetector(settings, now)
        self.connected: set[int] = set()
        self.heartbeats: dict[int, Heartbeat] = {}
        self.resignations: dict[tuple[int, Ballot], Resign] = {}  # by member and generation
        self.generations: dict[int, Generation] = {}  # the last that each member announced
        self.announced_at: dict[int, float] = {}  # when each was last sent this agent's own generation

    def forget_before(self, generation: Ballot) -> None:
        """Forget resignations from older generations: their successors are decided."""
        self.resignations = {key: resign for key, resign in self.resignations.items() if key[1] >= generation}

    def reachable(self) -> tuple[int, ...]:
        return tuple(member for member in sorted(self.connected) if self.detector.status(member) is PeerStatus.ALIVE)

    def is_reachable(self, member: int) -> bool:
        """Whether messages pass in both directions: only such a member can form a group with this agent."""
        if member == self.me:
            return True
        beat = self.heartbeats.get(member)
        is_alive = member in self.connected and self.detector.status(member) is PeerStatus.ALIVE
        return is_alive and (beat is None or self.me in beat.reachable)

    def has_resigned(self, member: int, generation: Generation) -> bool:
        return (member, generation.id) in self.resignations

    def has_lost_state(self, member: int, generation: Generation) -> bool:
        """Whether the member resigned, its agent ended, or it reports no state. Silence alone is not proof."""
        status = self.detector.status(member)
        if status is PeerStatus.GONE or self.has_resigned(member, generation):
            return True
        beat = self.heartbeats.get(member)
        return status is PeerStatus.ALIVE and beat is not None and not (beat.can_vote and beat.has_state)

    def is_elsewhere(self, member: int, generation: Generation) -> bool:
        """Whether it is in another generation by now, or has no vote in this one."""
        beat = self.heartbeats.get(member)
        return beat is not None and (beat.generation != generation.id or not beat.can_vote)

    def quorum(self, generation: Generation, passed: Generation | None = None) -> Quorum:
        """Return who votes on the successor.

        `passed`: a successor without this member, whose members have lost their state as far as is known; members of
        whom that is not known count against this side.
        """
        successors = frozenset(passed.members) if passed else frozenset()
        members = successors.union(generation.members)
        resigned = {member for member in members - successors if self.has_resigned(member, generation)}
        away = {member for member in members - {self.me} if self._is_away(member, generation)}
        return Quorum(members, frozenset(resigned), frozenset(away), closed=passed is not None)

    def candidates(self, generation: Generation) -> dict[int, JoinCandidate]:
        """Return the reachable nodes with ranks that ask to join; members that have resigned may return this way."""
        return {
            member: JoinCandidate(beat.ranks, beat.reachable)
            for member, beat in self.heartbeats.items()
            if beat.joins == generation.lineage.name and beat.ranks and self.is_reachable(member)
            if member not in generation.members or self.is_elsewhere(member, generation)
        }

    def can_admit(self, generation: Generation, present: list[int], free_ranks: int) -> bool:
        """Whether a candidate that every present member reaches, and that reaches every one of them, would fit."""
        return any(
            len(candidate.ranks) <= free_ranks
            and all(
                other == self.me or member in self.heartbeats[other].reachable
                for other in present
                if other in self.heartbeats
            )
            and set(present) <= set(candidate.reachable)
            for member, candidate in self.candidates(generation).items()
        )

    def best_lineage(self, own: Generation | None, committed: int) -> Ballot | None:
        """Return the lineage that should stay: this agent's own, or one all of whose members it can reach."""
        steps: dict[Ballot, int] = {} if own is None else {own.lineage.name: committed}
        for member, beat in self.heartbeats.items():
            is_candidate = beat.can_vote and beat.has_state and self.is_reachable(member)
            if is_candidate and (own is None or self._could_join(member, own)) and beat.lineage is not None:
                steps[beat.lineage] = max(steps.get(beat.lineage, 0), beat.committed)
        return choose_lineage(steps) if steps else None

    def newest_generation(self, lineage: Ballot | None) -> Generation | None:
        """Return the newest generation of this lineage that a reachable member trains in."""
        known = (self._generation_of(member) for member in self.reachable())
        of_lineage = (generation for generation in known if generation and generation.lineage.name == lineage)
        return max(of_lineage, key=lambda generation: generation.id, default=None)

    def spares(self) -> set[int]:
        return {member for member in self.reachable() if (beat := self.heartbeats.get(member)) and beat.is_spare}

    def is_overtaken(self, own: Generation) -> bool:
        """Whether a reachable member is in a later generation of this lineage that excludes this agent. If it includes
        this agent, its announcement is on the way."""
        return any(
            later.lineage.name == own.lineage.name and later.id > own.id and self.me not in later.members
            for member in self.reachable()
            if (later := self._generation_of(member)) is not None
        )

    def cause(self, member: int, generation: Generation) -> Cause:
        """Return why the member is missing."""
        if self.has_resigned(member, generation):
            return self.resignations[member, generation.id].why
        status = self.detector.status(member)
        if status is PeerStatus.GONE:
            return "closed"
        return "elsewhere" if status is PeerStatus.ALIVE and self.is_elsewhere(member, generation) else "silent"

    def _could_join(self, member: int, own: Generation) -> bool:
        """Whether the member's lineage could admit this agent: to stop training for any other would gain nothing."""
        if self.heartbeats[member].lineage == own.lineage.name:
            return True
        generation = self._generation_of(member)
        return generation is not None and all(map(self.is_reachable, generation.members))

    def _generation_of(self, member: int) -> Generation | None:
        """Return the generation whose state the member has and in which it votes, if it has announced it."""
        beat, announced = self.heartbeats.get(member), self.generations.get(member)
        if beat and announced and beat.can_vote and beat.has_state and announced.id == beat.generation:
            return announced
        return None

    def _is_away(self, member: int, generation: Generation) -> bool:
        """Whether its agent ended, or it is in another generation or none and has lost its state."""
        if self.detector.status(member) is PeerStatus.GONE:
            return True
        beat = self.heartbeats.get(member)
        is_empty = beat is not None and not (beat.has_state and beat.can_vote)
        return is_empty and self.is_elsewhere(member, generation)

"""What one agent knows about membership, and the actions it wants done.

`MembershipState` is shared by the proposer, the acceptor and the state machine of one agent. None of them does I/O:
they append actions, and the agent performs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shoal.control.membership.failure_detector import PeerReports
from shoal.control.membership.messages import Announce, Heartbeat, Message, Why
from shoal.control.membership.sentences import Name
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import NEVER, Ballot, Generation, Ranks, State
from shoal.control.membership.vote_store import DurableVoter, VoteStore


@dataclass(frozen=True)
class SendMessage:
    to: int
    message: Message


@dataclass(frozen=True)
class StopGeneration:
    """Have the ranks leave this generation and report their state. What they compute in it later does not count."""

    generation: Ballot
    after_step: bool  # after their current step; otherwise at once


@dataclass(frozen=True)
class StartGeneration:
    """Have the ranks form this generation's group and begin with its state, copied if theirs differs."""

    generation: Generation
    has_state: bool  # false: the ranks' own state does not count until the copy has arrived


@dataclass(frozen=True)
class PauseTraining:
    """Log that this side must not train for now. Its state stays in memory, and the proposer keeps trying."""

    text: str


@dataclass(frozen=True)
class AbandonLineage:
    """Mark this agent's commits after `shared_step` that the surviving ledger lacks as abandoned: its lineage ended."""

    lineage: Ballot
    surviving: Ballot
    shared_step: int
    text: str


@dataclass(frozen=True)
class LogSentence:
    """Log one sentence for the user. All agents of a generation log the same one, so readers show it once."""

    generation: Ballot | None
    text: str


Action = SendMessage | StopGeneration | StartGeneration | PauseTraining | AbandonLineage | LogSentence


class Phase(Enum):
    TRAINING = "training"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass
class LocalRankStates:
    """The ranks of this agent, as far as membership depends on them."""

    numbers: Ranks = ()
    state: State | None = None  # when they stopped
    committed: int = 0
    has_state: bool = False
    phase: Phase = Phase.STOPPED
    after_step: bool = False  # they stop after their step
    can_lose_parts: bool = False  # of the state of the generation that they formed last

    def stop(self, generation: Ballot, after_step: bool) -> list[StopGeneration]:
        """Ask the ranks to stop once, and once more if they must not finish their step after all."""
        is_asked = self.phase is Phase.STOPPING and (after_step or not self.after_step)
        if self.phase is Phase.STOPPED or is_asked:
            return []
        self.phase, self.after_step = Phase.STOPPING, after_step
        return [StopGeneration(generation, after_step)]

    def record_stopped(self, state: State | None, numbers: Ranks) -> None:
        self.phase, self.state, self.numbers = Phase.STOPPED, state, numbers
        self.has_state = state is not None
        if state is not None:
            self.committed = max(self.committed, state.committed)

    def lose_all(self) -> None:
        self.phase, self.state, self.numbers, self.has_state = Phase.STOPPED, None, (), False


@dataclass
class Spare:
    """This agent was left out of the training, and waits until another member is lost."""

    members: set[int]  # those that train, as far as they are not lost
    missing_since: float | None = None  # since when one of them does not train


@dataclass
class GenerationProgress:
    """What this agent knows of the generation that it is in; another one begins anew."""

    entered_at: float
    alarm: bool = False  # it cannot continue as it is
    formed: bool = False  # the local ranks have formed its group
    passed: Generation | None = None  # a later generation of its lineage, which excludes this agent
    # After a sleep: members that must answer before the generation is trusted again.
    unconfirmed: set[int] = field(default_factory=set)


class MembershipState:
    def __init__(self, me: int, settings: MembershipSettings, votes: VoteStore, now: float, name: Name) -> None:
        self.me = me
        self.settings = settings
        self.name = name
        self.voter = DurableVoter(votes)
        self.peers = PeerReports(me, settings, now)
        self.ranks = LocalRankStates()
        self.now = now
        self.progress = GenerationProgress(now)
        self._beat_at = now
        # The lineage that this agent asks to join.
        self.joins: Ballot | None = None
        self.is_leaving = self.is_ending = False
        self.spare: Spare | None = None
        self.inbox: list[Message] = []  # messages of this agent to itself
        self.actions: list[Action] = []

    def set_time(self, now: float) -> None:
        """After a sleep, trust the generation only when every other member has confirmed it."""
        self.now = now
        if self.peers.detector.advance(now) and self.generation:
            self.progress.unconfirmed = set(self.generation.members) - {self.me}

    @property
    def generation(self) -> Generation | None:
        return self.voter.record.generation

    def send(self, to: int, message: Message) -> None:
        if to == self.me:
            self.inbox.append(message)
        elif to in self.peers.connected:
            self.actions.append(SendMessage(to, message))

    def broadcast(self, message: Message) -> None:
        for member in sorted(self.peers.connected):
            self.send(member, message)

    def log(self, text: str, generation: Ballot | None = None) -> None:
        self.actions.append(LogSentence(generation, text))

    def send_heartbeat(self, at_once: bool = True) -> None:
        if not at_once and self.now - self._beat_at < self.settings.heartbeat_s:
            return
        self._beat_at = self.now
        current = self.generation
        beat = Heartbeat(
            generation=current.id if current else None,
            lineage=current.lineage.name if current else None,
            committed=self.ranks.committed,
            reachable=self.peers.reachable(),
            can_vote=self.voter.may_vote(),
            has_state=self.ranks.has_state,
            joins=self.joins,
            is_spare=self.spare is not None,
            # Ranks that still leave another generation cannot join one.
            ranks=self.ranks.numbers if self.ranks.phase is Phase.STOPPED else (),
        )
        self.broadcast(beat)

    def introduce(self, member: int) -> None:
        """Repeat the resignation or generation over a new connection: an earlier message may be lost with the old."""
        self.peers.announced_at.pop(member, None)
        if resignation := self.voter.resignation():
            self.send(member, resignation)
        else:
            self.announce(member)

    def resign(self, generation: Generation, why: Why) -> None:
        """Give up the vote in this generation and stop this agent's ranks."""
        self.voter.resign(why)
        self.actions += self.ranks.stop(generation.id, after_step=False)
        if resignation := self.voter.resignation():
            self.broadcast(resignation)

    def announce(self, to: int) -> None:
        """Send the generation in which this agent votes; not for every heartbeat that piled up while one side slept."""
        since_s = self.now - self.peers.announced_at.get(to, float("-inf"))
        if self.generation and self.voter.may_vote() and since_s >= self.settings.heartbeat_s:
            self.peers.announced_at[to] = self.now
            self.send(to, Announce(generation=self.generation))

    def is_current(self, generation: Ballot | None) -> bool:
        return self.generation is not None and self.generation.id == (generation or NEVER)

    def is_settled(self) -> bool:
        """Whether every member has had time to learn of this generation: one that is elsewhere now stays there."""
        return self.now - self.progress.entered_at > self.settings.stop_timeout_s

    def present(self, current: Generation) -> list[int]:
        """Return the members of the current generation that will answer, this agent included, lowest first."""
        return [member for member in sorted(current.members) if member == self.me or not self._is_out(member, current)]

    def is_missing(self, current: Generation) -> bool:
        return self.progress.alarm or len(self.present(current)) < len(current.members)

    def could_grow(self, current: Generation) -> bool:
        """Whether a candidate, or a new rank of this agent, can join after the next step.

        Not before the group has committed a step or `stop_timeout_s` has passed: nodes that come and go must not keep
        the others from training.
        """
        has_progressed = self.progress.formed and (self.ranks.committed > current.state.committed or self.is_settled())
        if not has_progressed:
            return False
        has_new_ranks = set(self.ranks.numbers) > set(current.ranks_of(self.me))
        has_room = len(current.members) < self.settings.max_nodes
        free_ranks = self.settings.max_ranks - current.world_size if has_room else 0
        return has_new_ranks or self.peers.can_admit(current, self.present(current), free_ranks)

    def is_state_lost(self, last: Generation) -> bool:
        """Whether no other member of this agent's last generation has its state any more, as far as is known."""
        return all(self.peers.has_lost_state(member, last) for member in last.members if member != self.me)

    def ready_to_recover(self, last: Generation) -> dict[int, Ranks]:
        """Return the ranks of the members that can go back to a checkpoint, this agent included.

        Empty unless the state is lost: every member of the newest generation known here is gone or has lost it.
        """
        beats = {member: beat for member, beat in self.peers.heartbeats.items() if self.peers.is_reachable(member)}
        if any(beat.can_vote or (beat.generation is not None and beat.generation > last.id) for beat in beats.values()):
            # A member with a vote decides what follows. One that was in a later generation knows better which members
            # may have the state.
            return {}
        if not self.is_state_lost(last):
            return {}
        ready = {member: beat.ranks for member, beat in beats.items() if beat.ranks and not beat.joins}
        if self.ranks.phase is Phase.STOPPED and self.ranks.numbers:
            ready[self.me] = self.ranks.numbers
        return ready

    def _is_out(self, member: int, current: Generation) -> bool:
        peers, beat = self.peers, self.peers.heartbeats.get(member)
        is_leaving = beat is not None and beat.generation == current.id and beat.joins is not None
        is_elsewhere = self.is_settled() and peers.is_elsewhere(member, current)
        return is_leaving or is_elsewhere or peers.has_resigned(member, current) or not peers.is_reachable(member)

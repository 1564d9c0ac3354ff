"""What the parts of one agent's council share: what it knows, what time it is, and what is to be sent and done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal.control.membership.failure_detector import PeerReports
from shoal.control.membership.messages import Announce, Heartbeat, Message
from shoal.control.membership.sentences import Name
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import NEVER, Ballot, Generation, Ranks, State
from shoal.control.membership.vote_store import DurableVoter, VoteStore

# SECTION control/membership/actions
# What the council wants done. The agent does it; nothing else follows from a decision.


@dataclass(frozen=True)
class SendMessage:
    to: int
    message: Message


@dataclass(frozen=True)
class StopGeneration:
    """Ranks leave this generation, after their step (`at_edge`) or at once, and say where they stand. Nothing that
    they compute in it afterwards counts."""

    generation: Ballot
    at_edge: bool


@dataclass(frozen=True)
class StartGeneration:
    """Ranks form this generation's group and begin with its state, copied from its source where theirs differs. Unless
    they hold one of its own, what they have counts for nothing until that copy has arrived."""

    generation: Generation
    holds: bool


@dataclass(frozen=True)
class PauseTraining:
    """Nobody may go on here for now. The state stays where it is, and the council keeps asking."""

    text: str


@dataclass(frozen=True)
class AbandonLineage:
    """Our lineage has ended: our commits after `shared_step` that the standing ledger lacks are marked abandoned."""

    lineage: Ballot
    standing: Ballot
    shared_step: int
    text: str


@dataclass(frozen=True)
class LogSentence:
    """One plain sentence for the user; agents of one generation say the same, so readers show it once."""

    generation: Ballot | None
    text: str


Action = SendMessage | StopGeneration | StartGeneration | PauseTraining | AbandonLineage | LogSentence


# SECTION control/membership/ownranks
# Where the ranks of this agent stand, as far as membership goes.


class Phase(Enum):
    TRAINING = "training"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass
class LocalRankStates:
    numbers: Ranks = ()
    state: State | None = None
    committed: int = 0
    holds: bool = False
    phase: Phase = Phase.STOPPED
    at_edge: bool = False

    def halt(self, generation: Ballot, at_edge: bool) -> list[StopGeneration]:
        """Asks them to stop, once, and once more where there is no time left for their step."""
        asked = self.phase is Phase.STOPPING and (at_edge or not self.at_edge)
        if self.phase is Phase.STOPPED or asked:
            return []
        self.phase, self.at_edge = Phase.STOPPING, at_edge
        return [StopGeneration(generation, at_edge)]

    def halted(self, state: State | None, numbers: Ranks) -> None:
        self.phase, self.state, self.numbers = Phase.STOPPED, state, numbers
        self.holds = state is not None
        if state is not None:
            self.committed = max(self.committed, state.committed)

    def has(self, state: State) -> bool:
        own = self.state
        return own is not None and own.digest != "" and (own.step, own.digest) == (state.step, state.digest)

    def lose_all(self) -> None:
        self.phase, self.state, self.numbers, self.holds = Phase.STOPPED, None, (), False


class MembershipState:
    """`asks`: the lineage we want to be let into. `passed`: a later generation of our lineage that has no seat for us.
    `alarm`: this generation cannot go on as it is. `unsure`: whom we have to hear before we trust our generation again.
    """

    def __init__(self, me: int, rules: MembershipSettings, promises: VoteStore, now: float, name: Name) -> None:
        self.me = me
        self.rules = rules
        self.name = name
        self.voter = DurableVoter(promises)
        self.view = PeerReports(me, rules, now)
        self.ranks = LocalRankStates()
        self.now = self.began_at = self._beat_at = now
        self.asks: Ballot | None = None
        self.passed: Generation | None = None
        self.unsure: set[int] = set()
        self.alarm = self.formed = self.is_leaving = self.is_ending = False
        self.inbox: list[Message] = []
        self.actions: list[Action] = []
        self._announced_at: dict[int, float] = {}

    @property
    def generation(self) -> Generation | None:
        return self.voter.record.generation

    # To others.

    def post(self, to: int, message: Message) -> None:
        if to == self.me:
            self.inbox.append(message)
        elif to in self.view.linked:
            self.actions.append(SendMessage(to, message))

    def tell_all(self, message: Message) -> None:
        for member in sorted(self.view.linked):
            self.post(member, message)

    def say(self, text: str, generation: Ballot | None = None) -> None:
        self.actions.append(LogSentence(generation, text))

    def beat(self, at_once: bool = True) -> None:
        if not at_once and self.now - self._beat_at < self.rules.beat_s:
            return
        self._beat_at = self.now
        current = self.generation
        beat = Heartbeat(
            generation=current.id if current else None,
            lineage=current.lineage.name if current else None,
            committed=self.ranks.committed,
            hears=self.view.hears(),
            votes=self.voter.may_vote(),
            holds=self.ranks.holds,
            asks=self.asks,
            # Nobody is let in whose ranks are still on their way out of another generation.
            ranks=self.ranks.numbers if self.ranks.phase is Phase.STOPPED else (),
        )
        self.tell_all(beat)

    def introduce(self, member: int) -> None:
        """Connections break and are made again: what was said over an old one may not have arrived."""
        self._announced_at.pop(member, None)
        if word := self.voter.resignation():
            self.post(member, word)
        else:
            self.announce(member)

    def announce(self, to: int) -> None:
        """Which generation we may vote in; not in answer to each heartbeat that piled up while one of us slept."""
        since_s = self.now - self._announced_at.get(to, float("-inf"))
        if self.generation and self.voter.may_vote() and since_s >= self.rules.beat_s:
            self._announced_at[to] = self.now
            self.post(to, Announce(generation=self.generation))

    # Small questions.

    def is_current(self, generation: Ballot | None) -> bool:
        return self.generation is not None and self.generation.id == (generation or NEVER)

    def is_settled(self) -> bool:
        """Everybody has had the time to hear of our generation: who is elsewhere now wants to be."""
        return self.now - self.began_at > self.rules.answer_s

    def present(self, current: Generation) -> list[int]:
        """Members of our generation that will answer, ourselves included, lowest first."""
        return [member for member in sorted(current.members) if member == self.me or not self._is_out(member, current)]

    def is_missing(self, current: Generation) -> bool:
        return self.alarm or len(self.present(current)) < len(current.members)

    def could_grow(self, current: Generation) -> bool:
        """Whether a guest, or a new rank of ours, can come in at the next edge. Not before the last change has paid:
        those that come and go must not keep the others from training."""
        paid = self.formed and (self.ranks.committed > current.state.committed or self.is_settled())
        if not paid:
            return False
        more = set(self.ranks.numbers) > set(current.ranks_of(self.me))
        room = self.rules.most_ranks - current.world_size if len(current.members) < self.rules.max_nodes else 0
        return more or self.view.welcome(current, self.present(current), room)

    def is_state_lost(self, last: Generation) -> bool:
        """Whether no other member of our last generation has its state any more, as far as is known here."""
        return all(self.view.has_lost_state(member, last) for member in last.members if member != self.me)

    def ready_to_recover(self, last: Generation) -> dict[int, Ranks]:
        """Members without a state that have ranks, ourselves included, if no other can have it: every member of the
        newest generation that any of them was in is gone or has lost it. Otherwise none."""
        around = {member: beat for member, beat in self.view.beats.items() if self.view.usable(member)}
        if any(beat.votes or (beat.generation is not None and beat.generation > last.id) for beat in around.values()):
            # A member with a vote decides what follows. One that was with the others for longer knows better who may
            # have the state.
            return {}
        if not self.is_state_lost(last):
            return {}
        ready = {member: beat.ranks for member, beat in around.items() if beat.ranks and not beat.asks}
        if self.ranks.phase is Phase.STOPPED and self.ranks.numbers:
            ready[self.me] = self.ranks.numbers
        return ready

    def _is_out(self, member: int, current: Generation) -> bool:
        view, beat = self.view, self.view.beats.get(member)
        leaves = beat is not None and beat.generation == current.id and beat.asks is not None
        elsewhere = self.is_settled() and view.is_elsewhere(member, current)
        return leaves or elsewhere or view.has_resigned(member, current) or not view.usable(member)

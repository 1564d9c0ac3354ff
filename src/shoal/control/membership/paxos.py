"""How one agent proposes what follows its generation, when that falls to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.control.membership import sentences
from shoal.control.membership.messages import Accept, Accepted, Alarm, Prepare, Promise, Refuse, Resign, Vote
from shoal.control.membership.quorum import Quorum, QuorumDecision, QuorumVerdict, succeed
from shoal.control.membership.state import MembershipState, PauseTraining, Phase
from shoal.control.membership.types import Ballot, Generation

# SECTION control/membership/elector
# How one agent answers those who propose a successor.


class Acceptor:
    def __init__(self, desk: MembershipState) -> None:
        self._desk = desk
        self._complained = False
        self.due: Prepare | None = None
        self.promised_at = desk.now

    def on_prepare(self, proposer: int, prepare: Prepare) -> bool:
        """Whether it gets our promise. That goes out by `answer`, when our ranks are out."""
        desk = self._desk
        desk.voter.saw(prepare.ballot.number)
        if not self._may_answer(proposer, prepare.generation):
            return False
        if not self._cast(lambda: desk.voter.promise(prepare.ballot)):
            desk.post(proposer, Refuse(generation=prepare.generation, ballot=desk.voter.record.promised))
            return False
        self.due, self.promised_at = prepare, desk.now
        return True

    def on_accept(self, proposer: int, accept: Accept) -> None:
        desk = self._desk
        if not self._may_answer(proposer, accept.generation):
            return
        vote = Vote(ballot=accept.ballot, successor=accept.successor)
        if self._cast(lambda: desk.voter.accept(vote)):
            desk.post(proposer, Accepted(generation=accept.generation, ballot=accept.ballot))
        else:
            desk.post(proposer, Refuse(generation=accept.generation, ballot=desk.voter.record.promised))

    def answer(self, current: Generation) -> None:
        desk, due = self._desk, self.due
        if due is None or desk.ranks.phase is not Phase.STOPPED:
            return
        self.due = None
        promise = Promise(
            generation=current.id,
            ballot=due.ballot,
            state=desk.ranks.state,
            ranks=desk.ranks.numbers,
            hears=desk.view.hears(),
            accepted=desk.voter.record.accepted,
        )
        desk.post(due.ballot.proposer, promise)

    def _may_answer(self, proposer: int, generation: Ballot) -> bool:
        """Who wants to leave a lineage does not say how it goes on; who is ahead tells who is behind."""
        desk = self._desk
        if not desk.is_current(generation):
            desk.announce(proposer)
            return False
        return desk.voter.may_vote() and desk.asks is None

    def _cast(self, vote: Callable[[], bool]) -> bool:
        """A vote that cannot be written down is not given."""
        try:
            return vote()
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._desk.say(sentences.cannot_promise(self._desk.me, error, self._desk.name))
            return False


# SECTION control/membership/round
# One attempt to agree on a successor, from its proposer's side.


@dataclass
class PaxosRound:
    base: Generation
    ballot: Ballot
    at_edge: bool
    began_at: float
    promises: dict[int, Promise] = field(default_factory=dict)
    outcome: QuorumDecision | None = None
    accepts: set[int] = field(default_factory=set)

    def waits_for(self, present: Iterable[int]) -> bool:
        return any(member not in self.promises for member in present)

    def hurry(self, now: float) -> None:
        """Somebody went missing while ranks were still to end their step: they can't any more."""
        if self.at_edge:
            self.at_edge, self.began_at = False, now

    def outbid_by(self, resignations: Iterable[Resign]) -> Ballot | None:
        """A resigned member answers every ballot, and no lower one than it had promised."""
        return max((word.promised for word in resignations if word.promised > self.ballot), default=None)

    def bound_to(self, electorate: Quorum, words: Mapping[int, Resign]) -> QuorumDecision | None:
        """A successor that may have been decided already, unknown to us, must be proposed again as it is."""
        votes = [promise.accepted for promise in self.promises.values()]
        votes += [word.accepted for member, word in words.items() if member in electorate.resigned]
        known = [vote for vote in votes if vote is not None]
        if not known or len(self.promises.keys() & electorate.voters) < electorate.quorum:
            return None
        newest: Vote = max(known, key=lambda vote: vote.ballot)
        return QuorumDecision(QuorumVerdict.CONTINUE, newest.successor, electorate.voters, electorate.quorum)

    def decided(self) -> Generation | None:
        outcome = self.outcome
        enough = outcome is not None and len(self.accepts & outcome.electors) >= outcome.quorum
        return outcome.successor if outcome and enough else None


# A pause is looked at again this often, even when nothing seems to have changed.
_AGAIN_S = 1.0


class Proposer:
    def __init__(self, desk: MembershipState, elector: Acceptor) -> None:
        self._desk = desk
        self._elector = elector
        self._round: PaxosRound | None = None
        self._need_since: float | None = None
        self._next_try = desk.now
        self._paused = False
        self._scene: object = None
        self._sight: object = None
        self._calm_since = desk.now
        # Since when no member that answers has a state.
        self._stateless_since: float | None = None

    @property
    def needed_s(self) -> float:
        """How long a successor has been sought."""
        return 0.0 if self._need_since is None else self._desk.now - self._need_since

    def reset(self) -> None:
        """A new generation, and everybody trains."""
        self.step_down()
        self._paused = False
        self._stateless_since = None

    def step_down(self) -> None:
        self._round = self._need_since = None

    def yield_to(self, proposer: int) -> None:
        """We promised ourselves to somebody else's ballot."""
        if proposer != self._desk.me:
            self._round = None

    def remind(self, member: int) -> None:
        """It is connected again: what we asked, or what it answered, may have been lost with the old connection."""
        round = self._round
        if round and member in round.base.members:
            self._ask(round, member)

    def on_answer(self, sender: int, answer: Promise | Accepted | Refuse) -> None:
        round = self._round
        if round is None or round.base.id != answer.generation:
            return
        if isinstance(answer, Refuse):
            self._desk.voter.saw(answer.ballot.number)
            if answer.ballot > round.ballot:
                self._drop_round()
        elif answer.ballot == round.ballot and isinstance(answer, Promise):
            round.promises[sender] = answer
        elif answer.ballot == round.ballot:
            round.accepts.add(sender)

    def preside(self, current: Generation, missing: bool) -> Generation | None:
        """Does what our turn asks for now; a successor once it is decided."""
        desk = self._desk
        if self._round is not None:
            return self._conclude(self._round, missing)
        if missing or desk.ranks.phase is not Phase.TRAINING or desk.could_grow(current):
            self._seek(current, missing)
        else:
            self._need_since = None
        return None

    def _seek(self, current: Generation, missing: bool) -> None:
        desk = self._desk
        if self._need_since is None:
            self._need_since = self._next_try = desk.now
            if missing:
                desk.tell_all(Alarm(generation=current.id))
        if self._scene_changed():
            self._next_try = min(self._next_try, desk.now)
        if desk.now >= max(self._next_try, self._my_turn(current, missing)):
            self._propose(current, at_edge=not missing and desk.ranks.phase is Phase.TRAINING)

    def _my_turn(self, current: Generation, missing: bool) -> float:
        """When it falls to us: after those before us, and after whoever we made a promise to, if it is there."""
        desk, rules = self._desk, self._desk.rules
        present = desk.present(current)
        turn = present.index(desk.me) * rules.turn_s
        promised = desk.voter.record.promised
        if promised.number and promised.proposer != desk.me and promised.proposer in present:
            patience = rules.edge_s if desk.ranks.at_edge and not missing else rules.answer_s
            return self._elector.promised_at + patience + turn
        return (desk.now if self._need_since is None else self._need_since) + turn

    def _propose(self, current: Generation, at_edge: bool) -> None:
        desk = self._desk
        ballot = Ballot(desk.voter.record.highest + 1, desk.me)
        self._round = PaxosRound(current, ballot, at_edge, desk.now)
        for member in current.members:
            self._ask(self._round, member)

    def _ask(self, round: PaxosRound, member: int) -> None:
        base, ballot = round.base.id, round.ballot
        if member not in round.promises:
            self._desk.post(member, Prepare(generation=base, ballot=ballot, at_edge=round.at_edge))
        elif round.outcome and round.outcome.successor:
            self._desk.post(member, Accept(generation=base, ballot=ballot, successor=round.outcome.successor))

    def _conclude(self, round: PaxosRound, missing: bool) -> Generation | None:
        desk = self._desk
        if missing:
            round.hurry(desk.now)
        late = desk.now - round.began_at > (desk.rules.edge_s if round.at_edge else desk.rules.answer_s)
        if round.outcome is None and desk.me in round.promises:
            if late or not round.waits_for(desk.present(round.base)):
                self._choose(round)
        elif late or round.decided():
            self._drop_round()
        return round.decided()

    def _choose(self, round: PaxosRound) -> None:
        desk, view, base = self._desk, self._desk.view, round.base
        electorate = view.electorate(base, desk.passed)
        words = {member: view.resignations[member, base.id] for member in electorate.resigned}
        if round.outbid_by(words.values()):
            self._drop_round()
            return
        bound = None if desk.passed else round.bound_to(electorate, words)
        gives_up_state = self._stateless_since is not None and (
            desk.now - self._stateless_since > desk.rules.recover_after_s
        )
        outcome = bound or succeed(
            base, round.ballot, electorate, round.promises, view.guests(base), desk.rules, gives_up_state
        )
        if outcome.why != "no state" and not (outcome.successor and outcome.successor.recovers):
            self._stateless_since = None
        elif self._stateless_since is None:
            self._stateless_since = desk.now
        if outcome.successor is None:
            self._pause(round, outcome.why)
            return
        if outcome.verdict is QuorumVerdict.FORK and self._should_wait(round, electorate):
            return
        round.outcome, round.began_at = outcome, desk.now
        for member in round.promises:
            self._ask(round, member)

    def _should_wait(self, round: PaxosRound, electorate: Quorum) -> bool:
        """A lineage of our own is for when the others are out of reach: not while one of them can be heard, which may
        hear us in a moment or go on already, nor before a broken connection could have been made again, or everybody
        heard of who just came back."""
        view = self._desk.view
        others = electorate.voters - electorate.away - round.promises.keys()
        guests = view.guests(round.base)
        heard = any(member not in guests for member in others.intersection(view.hears()))
        sight = view.hears(), electorate
        if sight != self._sight:
            self._sight, self._calm_since = sight, self._desk.now
        return heard or self._desk.now - self._calm_since < self._desk.rules.fork_after_s

    def _pause(self, round: PaxosRound, why: str) -> None:
        desk = self._desk
        self._round = None
        self._next_try = desk.now + _AGAIN_S
        if not self._paused:
            self._paused = True
            rules = desk.rules
            text = sentences.paused(
                why, sorted(round.promises), round.base, desk.name, rules.min_nodes, rules.recover_after_s
            )
            desk.actions.append(PauseTraining(text))

    def _drop_round(self) -> None:
        self._round = None
        self._next_try = self._desk.now + self._desk.rules.turn_s

    def _scene_changed(self) -> bool:
        view = self._desk.view
        beats = {member: (beat.hears, beat.asks) for member, beat in view.beats.items()}
        scene = (view.hears(), beats, dict(view.resignations))
        changed, self._scene = scene != self._scene, scene
        return changed

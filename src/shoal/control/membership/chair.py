"""How one agent proposes what follows its generation, when that falls to it."""

from __future__ import annotations

from shoal.control.membership import sentences
from shoal.control.membership.actions import Pause
from shoal.control.membership.desk import Desk
from shoal.control.membership.elector import Elector
from shoal.control.membership.generation import Ballot, Generation
from shoal.control.membership.messages import Accept, Accepted, Alarm, Prepare, Promise, Refuse
from shoal.control.membership.ownranks import Phase
from shoal.control.membership.round import Round
from shoal.control.membership.succession import Electorate, Verdict, succeed

# A pause is looked at again this often, even when nothing seems to have changed.
_AGAIN_S = 1.0


class Chair:
    def __init__(self, desk: Desk, elector: Elector) -> None:
        self._desk = desk
        self._elector = elector
        self._round: Round | None = None
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
        self._round = Round(current, ballot, at_edge, desk.now)
        for member in current.members:
            self._ask(self._round, member)

    def _ask(self, round: Round, member: int) -> None:
        base, ballot = round.base.id, round.ballot
        if member not in round.promises:
            self._desk.post(member, Prepare(generation=base, ballot=ballot, at_edge=round.at_edge))
        elif round.outcome and round.outcome.successor:
            self._desk.post(member, Accept(generation=base, ballot=ballot, successor=round.outcome.successor))

    def _conclude(self, round: Round, missing: bool) -> Generation | None:
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

    def _choose(self, round: Round) -> None:
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
        if outcome.verdict is Verdict.FORK and self._should_wait(round, electorate):
            return
        round.outcome, round.began_at = outcome, desk.now
        for member in round.promises:
            self._ask(round, member)

    def _should_wait(self, round: Round, electorate: Electorate) -> bool:
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

    def _pause(self, round: Round, why: str) -> None:
        desk = self._desk
        self._round = None
        self._next_try = desk.now + _AGAIN_S
        if not self._paused:
            self._paused = True
            rules = desk.rules
            text = sentences.paused(
                why, sorted(round.promises), round.base, desk.name, rules.min_nodes, rules.recover_after_s
            )
            desk.actions.append(Pause(text))

    def _drop_round(self) -> None:
        self._round = None
        self._next_try = self._desk.now + self._desk.rules.turn_s

    def _scene_changed(self) -> bool:
        view = self._desk.view
        beats = {member: (beat.hears, beat.asks) for member, beat in view.beats.items()}
        scene = (view.hears(), beats, dict(view.resignations))
        changed, self._scene = scene != self._scene, scene
        return changed

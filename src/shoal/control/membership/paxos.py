"""The acceptor and the proposer of one agent: Paxos on the successor of a generation.

The acceptors are the members of the last generation. Any member may propose; the lowest present one does, and the next
one when it does not within `proposer_backoff_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.control.membership import sentences
from shoal.control.membership.messages import Accept, Accepted, Alarm, Prepare, Promise, Refuse, Resign, Vote
from shoal.control.membership.quorum import Quorum, QuorumDecision, QuorumVerdict, decide_successor
from shoal.control.membership.settings import PAUSE_RETRY_S
from shoal.control.membership.state import MembershipState, PauseTraining, Phase
from shoal.control.membership.types import Ballot, Generation


class Acceptor:
    def __init__(self, state: MembershipState) -> None:
        self._state = state
        self._has_logged_error = False
        self.pending: Prepare | None = None  # a promise that is sent when this agent's ranks have stopped
        self.promised_at = state.now

    def on_prepare(self, proposer: int, prepare: Prepare) -> bool:
        """Return whether the ballot is promised. `answer` sends the promise when this agent's ranks have stopped."""
        state = self._state
        state.voter.saw(prepare.ballot.number)
        if not self._may_answer(proposer, prepare.generation):
            return False
        if not self._try_vote(lambda: state.voter.promise(prepare.ballot)):
            state.send(proposer, Refuse(generation=prepare.generation, ballot=state.voter.record.promised))
            return False
        self.pending, self.promised_at = prepare, state.now
        return True

    def on_accept(self, proposer: int, accept: Accept) -> None:
        state = self._state
        if not self._may_answer(proposer, accept.generation):
            return
        vote = Vote(ballot=accept.ballot, successor=accept.successor)
        if self._try_vote(lambda: state.voter.accept(vote)):
            state.send(proposer, Accepted(generation=accept.generation, ballot=accept.ballot))
        else:
            state.send(proposer, Refuse(generation=accept.generation, ballot=state.voter.record.promised))

    def answer(self, current: Generation) -> None:
        """Send the pending promise, once this agent's ranks have stopped."""
        state, pending = self._state, self.pending
        if pending is None or state.ranks.phase is not Phase.STOPPED:
            return
        self.pending = None
        promise = Promise(
            generation=current.id,
            ballot=pending.ballot,
            state=state.ranks.state,
            ranks=state.ranks.numbers,
            reachable=state.peers.reachable(),
            accepted=state.voter.record.accepted,
        )
        state.send(pending.ballot.proposer, promise)

    def _may_answer(self, proposer: int, generation: Ballot) -> bool:
        """Whether this agent votes in it: not while it is leaving. A proposer that is behind is sent the generation."""
        state = self._state
        if not state.is_current(generation):
            state.announce(proposer)
            return False
        return state.voter.may_vote() and state.joins is None

    def _try_vote(self, vote: Callable[[], bool]) -> bool:
        """Return false for a vote that cannot be written to disk: it must not be given."""
        try:
            return vote()
        except OSError as error:
            if not self._has_logged_error:
                self._has_logged_error = True
                self._state.log(sentences.cannot_promise(self._state.me, error, self._state.name))
            return False


@dataclass
class PaxosRound:
    """One ballot of a proposer."""

    base: Generation
    ballot: Ballot
    after_step: bool
    began_at: float
    promises: dict[int, Promise] = field(default_factory=dict)
    decision: QuorumDecision | None = None  # chosen at the end of phase 1
    accepts: set[int] = field(default_factory=set)

    def waits_for(self, present: Iterable[int]) -> bool:
        return any(member not in self.promises for member in present)

    def hurry(self, now: float) -> None:
        """Stop waiting for ranks to finish their step: a member is missing, so they cannot."""
        if self.after_step:
            self.after_step, self.began_at = False, now

    def outbid_by(self, resignations: Iterable[Resign]) -> Ballot | None:
        """Return a higher ballot that a resigned member had promised: it answers every ballot, but no lower one."""
        return max((resign.promised for resign in resignations if resign.promised > self.ballot), default=None)

    def bound_to(self, quorum: Quorum, resignations: Mapping[int, Resign]) -> QuorumDecision | None:
        """Return a successor that may already be decided: it must be proposed again unchanged."""
        votes = [promise.accepted for promise in self.promises.values()]
        votes += [resign.accepted for member, resign in resignations.items() if member in quorum.resigned]
        accepted = [vote for vote in votes if vote is not None]
        if not accepted or len(self.promises.keys() & quorum.voters) < quorum.majority:
            return None
        newest: Vote = max(accepted, key=lambda vote: vote.ballot)
        return QuorumDecision(QuorumVerdict.CONTINUE, newest.successor, quorum.voters, quorum.majority)

    def decided(self) -> Generation | None:
        decision = self.decision
        if decision is None or len(self.accepts & decision.voters) < decision.majority:
            return None
        return decision.successor


class Proposer:
    def __init__(self, state: MembershipState, acceptor: Acceptor) -> None:
        self._state = state
        self._acceptor = acceptor
        self._round: PaxosRound | None = None
        self._needed_since: float | None = None  # since when a successor is needed
        self._next_try = state.now
        self._is_paused = False
        self._last_reports: object = None  # what peers reported at the last look
        self._last_view: object = None  # who was reachable when a fork was last considered
        self._view_since = state.now  # when that last changed
        self._stateless_since: float | None = None  # since when no member that answers has a state

    @property
    def needed_s(self) -> float:
        """How long a successor has been needed."""
        return 0.0 if self._needed_since is None else self._state.now - self._needed_since

    def reset(self) -> None:
        """Start over in a new generation."""
        self.step_down()
        self._is_paused = False
        self._stateless_since = None

    def step_down(self) -> None:
        self._round = self._needed_since = None

    def yield_to(self, proposer: int) -> None:
        """Drop this agent's ballot: it promised another proposer's."""
        if proposer != self._state.me:
            self._round = None

    def resend(self, member: int) -> None:
        """Repeat this agent's request over a new connection: it, or the answer, may be lost with the old one."""
        round = self._round
        if round and member in round.base.members:
            self._request(round, member)

    def on_answer(self, sender: int, answer: Promise | Accepted | Refuse) -> None:
        round = self._round
        if round is None or round.base.id != answer.generation:
            return
        if isinstance(answer, Refuse):
            self._state.voter.saw(answer.ballot.number)
            if answer.ballot > round.ballot:
                self._drop_round()
        elif answer.ballot == round.ballot and isinstance(answer, Promise):
            round.promises[sender] = answer
        elif answer.ballot == round.ballot:
            round.accepts.add(sender)

    def advance(self, current: Generation, missing: bool) -> Generation | None:
        """Propose or continue a ballot, if it is this agent's turn; return the successor once it is decided."""
        state = self._state
        if self._round is not None:
            return self._advance_round(self._round, missing)
        if not missing and state.ranks.phase is Phase.TRAINING and not state.could_grow(current):
            self._needed_since = None
            return None
        if self._needed_since is None:
            self._needed_since = self._next_try = state.now
            if missing:
                state.broadcast(Alarm(generation=current.id))
        if self._have_reports_changed():
            self._next_try = min(self._next_try, state.now)
        if state.now >= max(self._next_try, self._turn_at(current, missing)):
            self._propose(current, after_step=not missing and state.ranks.phase is Phase.TRAINING)
        return None

    def _turn_at(self, current: Generation, missing: bool) -> float:
        """Return when it is this agent's turn: after the members before it and a present proposer that it promised."""
        state, settings = self._state, self._state.settings
        present = state.present(current)
        backoff_s = present.index(state.me) * settings.proposer_backoff_s
        promised = state.voter.record.promised
        if promised.number and promised.proposer != state.me and promised.proposer in present:
            is_waiting_for_step = state.ranks.after_step and not missing
            timeout_s = settings.step_end_timeout_s if is_waiting_for_step else settings.stop_timeout_s
            return self._acceptor.promised_at + timeout_s + backoff_s
        return (state.now if self._needed_since is None else self._needed_since) + backoff_s

    def _propose(self, current: Generation, after_step: bool) -> None:
        state = self._state
        ballot = Ballot(state.voter.record.highest + 1, state.me)
        self._round = PaxosRound(current, ballot, after_step, state.now)
        for member in current.members:
            self._request(self._round, member)

    def _request(self, round: PaxosRound, member: int) -> None:
        """Send the request of the round's current phase."""
        base, ballot = round.base.id, round.ballot
        if member not in round.promises:
            self._state.send(member, Prepare(generation=base, ballot=ballot, after_step=round.after_step))
        elif round.decision and round.decision.successor:
            self._state.send(member, Accept(generation=base, ballot=ballot, successor=round.decision.successor))

    def _advance_round(self, round: PaxosRound, missing: bool) -> Generation | None:
        state, settings = self._state, self._state.settings
        if missing:
            round.hurry(state.now)
        timeout_s = settings.step_end_timeout_s if round.after_step else settings.stop_timeout_s
        is_late = state.now - round.began_at > timeout_s
        if round.decision is None and state.me in round.promises:
            if is_late or not round.waits_for(state.present(round.base)):
                self._start_phase_two(round)
        elif is_late or round.decided():
            self._drop_round()
        return round.decided()

    def _start_phase_two(self, round: PaxosRound) -> None:
        """Choose a successor and request votes for it; or pause, or drop the round."""
        state, peers, base = self._state, self._state.peers, round.base
        quorum = peers.quorum(base, state.progress.passed)
        resignations = {member: peers.resignations[member, base.id] for member in quorum.resigned}
        if round.outbid_by(resignations.values()):
            self._drop_round()
            return
        bound = None if state.progress.passed else round.bound_to(quorum, resignations)
        gives_up_state = (
            self._stateless_since is not None and state.now - self._stateless_since > state.settings.recover_after_s
        )
        decision = bound or decide_successor(
            base, round.ballot, quorum, round.promises, peers.candidates(base), state.settings, gives_up_state
        )
        if decision.why != "no state" and not (decision.successor and decision.successor.recovers):
            self._stateless_since = None
        elif self._stateless_since is None:
            self._stateless_since = state.now
        if decision.successor is None:
            self._pause(round, decision.why)
            if decision.gives_up_vote:
                state.resign(base, "ranks")
            return
        if decision.verdict is QuorumVerdict.FORK and self._should_delay_fork(round, quorum):
            return
        round.decision, round.began_at = decision, state.now
        for member in round.promises:
            self._request(round, member)

    def _should_delay_fork(self, round: PaxosRound, quorum: Quorum) -> bool:
        """Whether it is too early to fork: a fork is for when the other members are out of reach.

        Not while one of them is reachable, because it may answer in a moment or have continued already. Nor before a
        broken connection could have been made again, or before all members know of one that just returned.
        """
        peers, now = self._state.peers, self._state.now
        others = quorum.voters - quorum.away - round.promises.keys()
        candidates = peers.candidates(round.base)
        is_reachable = any(member not in candidates for member in others.intersection(peers.reachable()))
        view = peers.reachable(), quorum
        if view != self._last_view:
            self._last_view, self._view_since = view, now
        return is_reachable or now - self._view_since < self._state.settings.fork_after_s

    def _pause(self, round: PaxosRound, why: str) -> None:
        state, settings = self._state, self._state.settings
        self._round = None
        self._next_try = state.now + PAUSE_RETRY_S
        if not self._is_paused:
            self._is_paused = True
            text = sentences.paused(
                why, sorted(round.promises), round.base, state.name, settings.min_nodes, settings.recover_after_s
            )
            state.actions.append(PauseTraining(text))

    def _drop_round(self) -> None:
        self._round = None
        self._next_try = self._state.now + self._state.settings.proposer_backoff_s

    def _have_reports_changed(self) -> bool:
        peers = self._state.peers
        beats = {member: (beat.reachable, beat.joins) for member, beat in peers.heartbeats.items()}
        reports = (peers.reachable(), beats, dict(peers.resignations))
        has_changed, self._last_reports = reports != self._last_reports, reports
        return has_changed

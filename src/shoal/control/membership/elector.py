"""How one agent answers those who propose a successor."""

from __future__ import annotations

from collections.abc import Callable

from shoal.control.membership import sentences
from shoal.control.membership.desk import Desk
from shoal.control.membership.generation import Ballot, Generation
from shoal.control.membership.messages import Accept, Accepted, Prepare, Promise, Refuse, Vote
from shoal.control.membership.ownranks import Phase


class Elector:
    def __init__(self, desk: Desk) -> None:
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

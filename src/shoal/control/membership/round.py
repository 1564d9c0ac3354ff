"""One attempt to agree on a successor, from its proposer's side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.control.membership.generation import Ballot, Generation
from shoal.control.membership.messages import Promise, Resign, Vote
from shoal.control.membership.succession import Electorate, Outcome, Verdict


@dataclass
class Round:
    base: Generation
    ballot: Ballot
    at_edge: bool
    began_at: float
    promises: dict[int, Promise] = field(default_factory=dict)
    outcome: Outcome | None = None
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

    def bound_to(self, electorate: Electorate, words: Mapping[int, Resign]) -> Outcome | None:
        """A successor that may have been decided already, unknown to us, must be proposed again as it is."""
        votes = [promise.accepted for promise in self.promises.values()]
        votes += [word.accepted for member, word in words.items() if member in electorate.resigned]
        known = [vote for vote in votes if vote is not None]
        if not known or len(self.promises.keys() & electorate.voters) < electorate.quorum:
            return None
        newest: Vote = max(known, key=lambda vote: vote.ballot)
        return Outcome(Verdict.CONTINUE, newest.successor, electorate.voters, electorate.quorum)

    def decided(self) -> Generation | None:
        outcome = self.outcome
        enough = outcome is not None and len(self.accepts & outcome.electors) >= outcome.quorum
        return outcome.successor if outcome and enough else None

"""What an agent must remember over its own end, and the rule by which it votes."""

from __future__ import annotations

import contextlib
from typing import Protocol

from shoal.control.membership.generation import NEVER, Ballot, Count, Generation, Plain
from shoal.control.membership.messages import Resign, Vote, Why

_MOST_ENTERED = 64


class Record(Plain):
    """`highest` is the highest number ever seen: none at or below it is used for a new ballot. `entered` are the newest
    generations that the agent was in; `guests` counts the new machines it gave an id."""

    generation: Generation | None = None
    promised: Ballot = NEVER
    accepted: Vote | None = None
    resigned: Why | None = None
    highest: Count = 0
    entered: tuple[Ballot, ...] = ()
    guests: Count = 0


class Promises(Protocol):
    """Where the record is kept. `save` returns when it would survive a power cut, and raises OSError otherwise."""

    def load(self) -> Record: ...

    def save(self, record: Record) -> None: ...


class Voter:
    """One agent's vote: never for a lower ballot than it promised, and written down before it is given."""

    def __init__(self, promises: Promises) -> None:
        self._promises = promises
        self.record = promises.load()

    def may_vote(self) -> bool:
        return self.record.generation is not None and self.record.resigned is None

    def saw(self, number: int) -> None:
        """Not worth a write: only a number under which a vote was given must not be used again."""
        if number > self.record.highest:
            self.record = self.record.model_copy(update={"highest": number})

    def use_next(self) -> int:
        """A number that no ballot had, for one that needs no votes. Returns when it would survive a power cut, and
        raises OSError otherwise: a restart must not use it for another generation."""
        self._keep(highest=self.record.highest + 1)
        return self.record.highest

    def promise(self, ballot: Ballot) -> bool:
        if ballot <= self.record.promised:
            # Asked again, over a new connection perhaps.
            return ballot == self.record.promised
        self.saw(ballot.number)
        self._keep_vote(promised=ballot)
        return True

    def accept(self, vote: Vote) -> bool:
        """Only under the very ballot that was promised last: our ranks stopped for it, and their state is in it."""
        if vote.ballot != self.record.promised or self.record.generation is None:
            return False
        # A fork has a name of its own that nobody else can use: it binds nobody, and must not hide a vote that does.
        if vote.successor.lineage.name == self.record.generation.lineage.name:
            self._keep_vote(accepted=vote)
        return True

    def enter(self, generation: Generation) -> None:
        self.saw(generation.id.number)
        entered = (*self.record.entered, generation.id)[-_MOST_ENTERED:]
        self._try_to_keep(generation=generation, promised=NEVER, accepted=None, resigned=None, entered=entered)

    def missed(self, generation: Generation) -> bool:
        """It had a seat for us, we never took it, and never will: only later ones are entered."""
        record = self.record
        past = record.generation is not None and generation.id < record.generation.id
        known = len(record.entered) < _MOST_ENTERED or generation.id > record.entered[0]
        return past and known and generation.id not in record.entered

    def resign(self, why: Why) -> None:
        self._try_to_keep(resigned=why)

    def count_guest(self) -> int:
        """How many there were before; raises OSError when it cannot be remembered."""
        before = self.record.guests
        self._keep(guests=before + 1)
        return before

    def resignation(self) -> Resign | None:
        record = self.record
        if record.generation is None or record.resigned is None:
            return None
        return Resign(
            generation=record.generation.id, why=record.resigned, promised=record.promised, accepted=record.accepted
        )

    def _keep_vote(self, **changes: object) -> None:
        """Where nobody else votes, nobody could be misled by what a restart forgets."""
        generation = self.record.generation
        if generation is not None and len(generation.members) == 1:
            self._try_to_keep(**changes)
        else:
            self._keep(**changes)

    def _try_to_keep(self, **changes: object) -> None:
        """What need not be remembered: after a restart the old record says less, and what it says is still true."""
        with contextlib.suppress(OSError):
            self._keep(**changes)
        self.record = self.record.model_copy(update=changes)

    def _keep(self, **changes: object) -> None:
        record = self.record.model_copy(update=changes)
        self._promises.save(record)
        self.record = record

"""What an agent must remember over its own end, and the rule by which it votes."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from shoal.control.membership.messages import Resign, Vote, Why
from shoal.control.membership.types import NEVER, Ballot, Count, Generation, StrictModel
from shoal.errors import ControlError
from shoal.run_folder import write_durably

_MOST_ENTERED = 64


class VoteRecord(StrictModel):
    """`highest` is the highest number ever seen: none at or below it is used for a new ballot. `entered` are the newest
    generations that the agent was in; `guests` counts the new machines it gave an id."""

    generation: Generation | None = None
    promised: Ballot = NEVER
    accepted: Vote | None = None
    resigned: Why | None = None
    highest: Count = 0
    entered: tuple[Ballot, ...] = ()
    guests: Count = 0


class VoteStore(Protocol):
    """Where the record is kept. `save` returns when it would survive a power cut, and raises OSError otherwise."""

    def load(self) -> VoteRecord: ...

    def save(self, record: VoteRecord) -> None: ...


class DurableVoter:
    """One agent's vote: never for a lower ballot than it promised, and written down before it is given."""

    def __init__(self, promises: VoteStore) -> None:
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


# SECTION control/membership/promisefile
# Promises on disk: one small file, replaced as a whole. The only I/O of this package.


class VoteFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> VoteRecord:
        """A new record where there is none. A broken one is never guessed at: a vote could be cast twice."""
        try:
            return VoteRecord.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return VoteRecord()
        except (OSError, ValidationError) as error:
            raise ControlError(
                f"cannot read which votes this machine has cast: {self._path}",
                why=getattr(error, "strerror", None) or "the file was changed or damaged",
                fix=f"remove it and let the machine join again as a new one: rm {shlex.quote(str(self._path))}",
            ) from None

    def save(self, record: VoteRecord) -> None:
        """The file, then its name: after a power cut there is the old record or the new one."""
        temporary = self._path.with_name(f".{self._path.name}.new")
        write_durably(self._path, record.model_dump_json().encode(), temporary, 0o600)

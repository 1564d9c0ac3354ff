"""An agent's votes: the rule by which it votes, and the file in which its votes survive a restart or a power cut."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from shoal.control.membership.messages import Resign, Vote, Why
from shoal.control.membership.types import NEVER, Ballot, Count, Generation, StrictModel
from shoal.errors import ControlError
from shoal.run_folder import write_durably

_MAX_ENTERED = 64


class VoteRecord(StrictModel):
    generation: Generation | None = None
    promised: Ballot = NEVER
    accepted: Vote | None = None
    resigned: Why | None = None
    highest: Count = 0  # the highest number ever seen: a new ballot gets a higher one
    entered: tuple[Ballot, ...] = ()  # the newest generations that the agent was in
    invited: Count = 0  # how many new nodes it gave an id


class VoteStore(Protocol):
    def load(self) -> VoteRecord: ...

    def save(self, record: VoteRecord) -> None:
        """Return when the record would survive a power cut; OSError otherwise."""


class DurableVoter:
    """One agent's vote: never for a lower ballot than it promised, and on disk before it is given."""

    def __init__(self, votes: VoteStore) -> None:
        self._votes = votes
        self.record = votes.load()

    def may_vote(self) -> bool:
        return self.record.generation is not None and self.record.resigned is None

    def saw(self, number: int) -> None:
        """Remember the highest number, in memory only: a vote writes it to disk before the number is used."""
        if number > self.record.highest:
            self.record = self.record.model_copy(update={"highest": number})

    def use_next(self) -> int:
        """Return an unused number for a ballot that needs no votes.

        OSError when it cannot be written to disk: a restart must not use it for another generation.
        """
        self._save(highest=self.record.highest + 1)
        return self.record.highest

    def promise(self, ballot: Ballot) -> bool:
        if ballot <= self.record.promised:
            # The proposer may repeat its request over a new connection.
            return ballot == self.record.promised
        self.saw(ballot.number)
        self._save_vote(promised=ballot)
        return True

    def accept(self, vote: Vote) -> bool:
        """Accept only under the ballot promised last: this agent's ranks stopped for it and it has their state."""
        if vote.ballot != self.record.promised or self.record.generation is None:
            return False
        # A fork has a name that no other proposer can use: it binds no agent and must not replace a vote that does.
        if vote.successor.lineage.name == self.record.generation.lineage.name:
            self._save_vote(accepted=vote)
        return True

    def enter(self, generation: Generation) -> None:
        self.saw(generation.id.number)
        entered = (*self.record.entered, generation.id)[-_MAX_ENTERED:]
        self._try_to_save(generation=generation, promised=NEVER, accepted=None, resigned=None, entered=entered)

    def set_shared_steps(self, left: Mapping[Ballot, int]) -> None:
        """Record what this lineage shares with earlier ones, which is known once the ranks have loaded a checkpoint."""
        generation = self.record.generation
        if generation is not None and (lineage := generation.lineage.with_shared_steps(left)) != generation.lineage:
            self._try_to_save(generation=generation.model_copy(update={"lineage": lineage}))

    def missed(self, generation: Generation) -> bool:
        """Whether this agent was a member, never entered it, and never will: only later ones are entered."""
        record = self.record
        is_past = record.generation is not None and generation.id < record.generation.id
        is_recorded = len(record.entered) < _MAX_ENTERED or generation.id > record.entered[0]
        return is_past and is_recorded and generation.id not in record.entered

    def resign(self, why: Why) -> None:
        self._try_to_save(resigned=why)

    def count_invited(self) -> int:
        """Count one more invited node; return how many there were before. OSError when it cannot be written."""
        before = self.record.invited
        self._save(invited=before + 1)
        return before

    def resignation(self) -> Resign | None:
        record = self.record
        if record.generation is None or record.resigned is None:
            return None
        return Resign(
            generation=record.generation.id, why=record.resigned, promised=record.promised, accepted=record.accepted
        )

    def _save_vote(self, **changes: object) -> None:
        """Save, but ignore a full disk where this agent is the only voter: a forgotten vote misleads no other."""
        generation = self.record.generation
        if generation is not None and len(generation.members) == 1:
            self._try_to_save(**changes)
        else:
            self._save(**changes)

    def _try_to_save(self, **changes: object) -> None:
        """Save what need not survive a restart: the old record says less, and what it says is still true."""
        with contextlib.suppress(OSError):
            self._save(**changes)
        self.record = self.record.model_copy(update=changes)

    def _save(self, **changes: object) -> None:
        record = self.record.model_copy(update=changes)
        self._votes.save(record)
        self.record = record


class VoteFile:
    """A `VoteStore` on disk: one small file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> VoteRecord:
        """Return the record, or a new one. ControlError for a damaged file: guessing could cast a vote twice."""
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
        temporary = self._path.with_name(f".{self._path.name}.new")
        write_durably(self._path, record.model_dump_json().encode(), temporary, 0o600)

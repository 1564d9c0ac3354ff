"""Messages about membership between an agent and its own ranks, over a socket that a rank inherits.

The agents decide; a rank follows the orders of its agent and reports its state. Both sides validate strictly, because
they may have different versions after an upgrade during a run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shoal.control.channel import frame
from shoal.control.membership.types import MAX_FORKS, Ballot, Count, Lineage, State, StrictModel
from shoal.errors import ControlError

# A rank of an elastic run inherits this descriptor from its agent, beside that of the store.
MEMBERSHIP_FD = "SHOAL_LINE_FD"
MAX_BYTES = 1 << 20
MAX_RANK_NUMBERS = 2**31
Number = Annotated[int, Field(ge=0, lt=MAX_RANK_NUMBERS)]


class EnterGeneration(StrictModel):
    """Form this generation's group as `rank` of `size`, under its own prefix in the store."""

    type: Literal["enter"] = "enter"
    generation: Ballot
    lineage: Lineage
    rank: Number
    local_rank: Number
    local_size: Number
    # The permanent numbers of all ranks, by which their files are named, in the order of their ranks.
    ids: Annotated[tuple[Number, ...], Field(min_length=1, max_length=4096)]
    nodes: Annotated[tuple[str, ...], Field(min_length=1, max_length=4096)]
    state: State  # a rank with another state copies it from `source`
    source: Number
    first: bool  # the first generation of the launch, in which all ranks begin alike
    has_state: bool  # false: the rank's own state does not count until the copy has arrived
    keeps_files: bool  # of the ranks that share a folder, this one writes its ledger and checkpoints
    # The number of ranks of the launch: the global batch and the learning rate stay those of that world.
    launched: Number
    recovers: bool = False  # no rank has a state: all begin with the newest checkpoint

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def prefix(self) -> str:
        return prefix_of(self.generation)


class LeaveGeneration(StrictModel):
    """Leave this generation and report the state."""

    type: Literal["leave"] = "leave"
    generation: Ballot
    after_step: bool  # after the current step; otherwise at once


class LeaseRenewed(StrictModel):
    """The lease: this generation was the newest at `at_s` on the boot clock; commit in it for `LEASE_S`."""

    type: Literal["lease"] = "lease"
    generation: Ballot
    at_s: float


class AbandonCommits(StrictModel):
    """After the copy, mark ledger entries of `lineage` after `shared_step` that `surviving` lacks as abandoned."""

    type: Literal["abandon"] = "abandon"
    lineage: Ballot
    surviving: Ballot
    shared_step: Count


class RankReady(StrictModel):
    """This rank has imported everything and can join."""

    type: Literal["ready"] = "ready"
    committed: Count  # the last step in the ledger that it took part in; a shared folder has other nodes' steps too
    max_ranks: Count | None = None  # ranks that can share its global batch, where the launcher does not know it


class GroupFormed(StrictModel):
    """The rank is in the group and has the generation's state."""

    type: Literal["formed"] = "formed"
    generation: Ballot
    copied_s: float = 0.0
    # The earlier lineages whose steps the state contains, and the step after which each was left.
    history: Annotated[tuple[tuple[Ballot, Count], ...], Field(max_length=MAX_FORKS)] = ()
    can_lose_parts: bool = False  # The model is divided, and no other rank has a copy of this rank's part.


class LeftGeneration(StrictModel):
    """The rank has left the generation for good."""

    type: Literal["left"] = "left"
    generation: Ballot
    state: State | None  # None: the state it had to copy had not arrived


class GenerationBroken(StrictModel):
    """The rank cannot continue in this generation: an exchange failed, or the group did not form."""

    type: Literal["broken"] = "broken"
    generation: Ballot
    why: Annotated[str, Field(max_length=500)]
    timed_out: bool = False  # another rank did not come in time, so that it may hang


class RankWaits(StrictModel):
    """The training, not only the thread that answers the agent, has left this generation and waits for the next one."""

    type: Literal["waits"] = "waits"
    generation: Ballot


class MachineTooSlow(StrictModel):
    """All ranks have found that this machine is too slow: leave it out, as a spare."""

    type: Literal["slow"] = "slow"
    generation: Ballot


class StepCommitted(StrictModel):
    type: Literal["committed"] = "committed"
    step: Count


class TrainingFinished(StrictModel):
    """The rank has passed the last barrier of the training."""

    type: Literal["finished"] = "finished"


ToRank = EnterGeneration | LeaveGeneration | LeaseRenewed | AbandonCommits
ToAgent = (
    RankReady
    | RankWaits
    | GroupFormed
    | LeftGeneration
    | GenerationBroken
    | MachineTooSlow
    | StepCommitted
    | TrainingFinished
)

_TO_RANK: TypeAdapter[ToRank] = TypeAdapter(Annotated[ToRank, Field(discriminator="type")])
_TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="type")])


def prefix_of(generation: Ballot) -> str:
    """Return the prefix of a generation's keys: `gen-7-2`, to which torch adds a slash."""
    return f"gen-{generation}"


def generation_of(key: str) -> Ballot | None:
    """Return the generation of a key; None for a key without one."""
    head, slash, _ = key.partition("/")
    parts = head.split("-")
    if not slash or len(parts) != 3 or parts[0] != "gen" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return Ballot(int(parts[1]), int(parts[2]))


def to_frame(message: ToRank | ToAgent) -> bytes:
    return frame(message.model_dump_json().encode())


def read_to_rank(payload: bytes) -> ToRank:
    message: ToRank = _read(_TO_RANK, payload)
    return message


def read_to_agent(payload: bytes) -> ToAgent:
    message: ToAgent = _read(_TO_AGENT, payload)
    return message


def _read(adapter: TypeAdapter[Any], payload: bytes) -> Any:
    try:
        return adapter.validate_json(payload)
    except (ValidationError, ValueError, RecursionError) as error:
        raise ControlError(
            f"an agent and its rank do not understand each other: {str(error).splitlines()[0]}",
            why="shoal was changed on this machine during the run",
            fix="end the run and resume it: shoal stop RUN; shoal train --resume RUN",
        ) from None

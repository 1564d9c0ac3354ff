"""What an agent and its own ranks say to each other about membership, over a socket that a rank inherits.

The agent's council decides; ranks only do what they are told and say where they stand. Strict on both sides, like the
messages between agents: the two may be of different installs after an upgrade in mid-run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shoal.control.membership.types import Ballot, Count, Lineage, State, StrictModel
from shoal.errors import ControlError

# The agent hands a rank of an elastic run this descriptor beside that of the store.
LINE_FD = "SHOAL_LINE_FD"
LENGTH = 4
MOST_BYTES = 1 << 20
# How long a lease lasts; the agent renews it four times as often.
LEASE_S = 1.0

MOST_NUMBERS = 2**31
Number = Annotated[int, Field(ge=0, lt=MOST_NUMBERS)]


class EnterGeneration(StrictModel):
    """Form this generation's group as `rank` of `size`, under its own prefix in the store.

    `ids` are the ranks' own numbers, by which their files are called, in the order of their ranks; a number is never
    given to anybody else. `first`: the launch's own first generation, in which everybody begins alike. In a later one
    whoever differs from `state` copies it from `source`; without `holds`, what it has counts for nothing until then.
    `recovers`: no rank has a state, and all begin with the newest checkpoint. `launched`: the launch had so many ranks;
    the global batch and the learning rate are those of that world, also after a recovery with other ranks.
    `keeps_files`: of the ranks that share a folder, this one keeps its ledger and checkpoints.
    """

    type: Literal["enter"] = "enter"
    generation: Ballot
    lineage: Lineage
    rank: Number
    local_rank: Number
    local_size: Number
    ids: Annotated[tuple[Number, ...], Field(min_length=1, max_length=4096)]
    nodes: Annotated[tuple[str, ...], Field(min_length=1, max_length=4096)]
    state: State
    source: Number
    first: bool
    holds: bool
    keeps_files: bool
    launched: Number
    recovers: bool = False

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def prefix(self) -> str:
        return prefix_of(self.generation)


class LeaveGeneration(StrictModel):
    """Leave this generation, after the step (`at_edge`) or at once, and say where you stand."""

    type: Literal["halt"] = "halt"
    generation: Ballot
    at_edge: bool


class LeaseRenewed(StrictModel):
    """This generation was still the newest at `at_s` on this machine's boot clock: commit in it for `LEASE_S`."""

    type: Literal["lease"] = "lease"
    generation: Ballot
    at_s: float


class AbandonCommits(StrictModel):
    """After the copy: the ledger's entries of `lineage` after `shared_step` that `standing` lacks are abandoned."""

    type: Literal["give-up"] = "give-up"
    lineage: Ballot
    standing: Ballot
    shared_step: Count


class RankReady(StrictModel):
    """This rank has imported everything and can take part; `committed`: the last step in the ledger
    that it took part in itself; a folder that several nodes share has the others' steps, too."""

    type: Literal["here"] = "here"
    committed: Count


class GroupFormed(StrictModel):
    """It is in the group and has the generation's state."""

    type: Literal["formed"] = "formed"
    generation: Ballot
    copied_s: float = 0.0


class LeftGeneration(StrictModel):
    """It is out for good. No state: what it had to copy had not arrived."""

    type: Literal["halted"] = "halted"
    generation: Ballot
    state: State | None


class GenerationBroken(StrictModel):
    """It cannot go on in this generation: an exchange failed, or the group did not form."""

    type: Literal["broken"] = "broken"
    generation: Ballot
    why: Annotated[str, Field(max_length=500)]


class StepCommitted(StrictModel):
    type: Literal["committed"] = "committed"
    step: Count


class TrainingFinished(StrictModel):
    """The last barrier of the training is passed."""

    type: Literal["finished"] = "finished"


ToRank = EnterGeneration | LeaveGeneration | LeaseRenewed | AbandonCommits
ToAgent = RankReady | GroupFormed | LeftGeneration | GenerationBroken | StepCommitted | TrainingFinished

_TO_RANK: TypeAdapter[ToRank] = TypeAdapter(Annotated[ToRank, Field(discriminator="type")])
_TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="type")])


def prefix_of(generation: Ballot) -> str:
    """Before every key that the ranks of a generation set: `gen-7-2/`, less the slash that torch adds."""
    return f"gen-{generation}"


def generation_of(key: str) -> Ballot | None:
    """The generation whose key this is, if it is one's."""
    head, slash, _ = key.partition("/")
    parts = head.split("-")
    if not slash or len(parts) != 3 or parts[0] != "gen" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return Ballot(int(parts[1]), int(parts[2]))


def to_frame(message: ToRank | ToAgent) -> bytes:
    payload = message.model_dump_json().encode()
    return len(payload).to_bytes(LENGTH, "big") + payload


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
            why="shoal was changed on this machine while the run was going on",
            fix="end the run and resume it: shoal stop RUN; shoal train --resume RUN",
        ) from None

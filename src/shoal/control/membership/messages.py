"""Messages about membership between agents: small, validated strictly, and none makes the receiver run anything."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shoal.control.channel import SAME_VERSIONS
from shoal.control.membership.types import MAX_MEMBERS, Ballot, Count, Generation, Member, Ranks, State, StrictModel
from shoal.errors import ControlError

# Two lists of 64 members with 64 ranks each fit into this; no agent sends more.
MAX_BYTES = 256 << 10

Members = Annotated[tuple[Member, ...], Field(max_length=4 * MAX_MEMBERS)]


class Vote(StrictModel):
    """An accepted successor and the ballot under which it was accepted."""

    ballot: Ballot
    successor: Generation


class Heartbeat(StrictModel):
    """Sent to every connected agent every `heartbeat_s`."""

    type: Literal["member-heartbeat"] = "member-heartbeat"
    generation: Ballot | None
    lineage: Ballot | None
    committed: Count
    reachable: Members  # the members that the sender receives messages from
    can_vote: bool  # on the successor of its generation
    has_state: bool  # its ranks have a state to train on from
    joins: Ballot | None = None  # the lineage that it asks to join, with `ranks`
    is_spare: bool = False  # it was left out because it is too slow, and waits until another member is lost
    ranks: Ranks = ()


class Alarm(StrictModel):
    """The sender's ranks cannot continue in this generation, or a member is missing: the first member shall propose."""

    type: Literal["member-alarm"] = "member-alarm"
    generation: Ballot


class Prepare(StrictModel):
    """Phase 1a: stop your ranks and promise this ballot."""

    type: Literal["member-prepare"] = "member-prepare"
    generation: Ballot
    ballot: Ballot
    after_step: bool  # after their current step, because no member is missing


class Promise(StrictModel):
    """Phase 1b: the sender's ranks have left this generation for good, and it votes for no lower ballot."""

    type: Literal["member-promise"] = "member-promise"
    generation: Ballot
    ballot: Ballot
    state: State | None  # None: the copy of a state had not arrived yet
    ranks: Ranks
    reachable: Members
    accepted: Vote | None = None  # what it had accepted before


class Refuse(StrictModel):
    """The sender has promised a higher ballot: this one."""

    type: Literal["member-refuse"] = "member-refuse"
    generation: Ballot
    ballot: Ballot


class Accept(StrictModel):
    """Phase 2a: vote for this successor."""

    type: Literal["member-accept"] = "member-accept"
    generation: Ballot
    ballot: Ballot
    successor: Generation


class Accepted(StrictModel):
    """Phase 2b: the sender has voted for the successor of this ballot."""

    type: Literal["member-accepted"] = "member-accepted"
    generation: Ballot
    ballot: Ballot


class Announce(StrictModel):
    """This generation is decided. Sent to every agent that seems not to know it."""

    type: Literal["member-announce"] = "member-announce"
    generation: Generation


Why = Literal["leave", "ranks", "suspend", "restart", "elsewhere", "slow"]


class Resign(StrictModel):
    """The sender gives up its vote on the successor of this generation forever, which counts as a promise to every
    ballot."""

    type: Literal["member-resign"] = "member-resign"
    generation: Ballot
    why: Why
    promised: Ballot
    accepted: Vote | None = None


Message = Heartbeat | Alarm | Prepare | Promise | Refuse | Accept | Accepted | Announce | Resign

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message) -> dict[str, Any]:
    """Return the message as `control.channel` carries it."""
    document: dict[str, Any] = message.model_dump(mode="json")
    return document


def decode(document: dict[str, Any]) -> Message:
    """Return the message; ControlError for another type, an unknown field or a value out of range."""
    text = json.dumps(document)
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text)} bytes")
        return _ADAPTER.validate_json(text)
    except ValueError as error:
        wrong = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else str(error)
        raise ControlError(
            f"a message about membership that cannot be read: {wrong}",
            why="the other side has another version of shoal, or is not shoal",
            fix=SAME_VERSIONS,
        ) from None

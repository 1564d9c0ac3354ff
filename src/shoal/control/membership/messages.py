"""What agents say to each other about membership: small, strict, and nothing that makes the other side run anything."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shoal.control.membership.types import MOST_MEMBERS, Ballot, Count, Generation, Member, Ranks, State, StrictModel
from shoal.errors import ControlError

# 64 members with 64 ranks each, twice, fit into this; anything larger was not written by us.
MOST_BYTES = 256 << 10

Members = Annotated[tuple[Member, ...], Field(max_length=4 * MOST_MEMBERS)]


class Vote(StrictModel):
    """A successor that somebody accepted, and under which ballot."""

    ballot: Ballot
    successor: Generation


class Heartbeat(StrictModel):
    """Every quarter of a second, to everybody. `hears`: whom the sender holds for here. `votes`: it may vote on what
    follows its generation. `holds`: its ranks have a state to train on from. `asks`: the lineage it wants to be let
    into, with these ranks."""

    type: Literal["member-beat"] = "member-beat"
    generation: Ballot | None
    lineage: Ballot | None
    committed: Count
    hears: Members
    votes: bool
    holds: bool
    asks: Ballot | None = None
    ranks: Ranks = ()


class Alarm(StrictModel):
    """The sender's ranks cannot go on in this generation, or it misses somebody: let the first member propose."""

    type: Literal["member-alarm"] = "member-alarm"
    generation: Ballot


class Prepare(StrictModel):
    """Stop your ranks and say where they stand; `at_edge`: after their step, since nobody is missing."""

    type: Literal["member-prepare"] = "member-prepare"
    generation: Ballot
    ballot: Ballot
    at_edge: bool


class Promise(StrictModel):
    """My ranks are out of this generation for good. No lower ballot gets my vote; this is what I had accepted before.
    Without `state` I have nothing to train on from: my copy had not arrived yet."""

    type: Literal["member-promise"] = "member-promise"
    generation: Ballot
    ballot: Ballot
    state: State | None
    ranks: Ranks
    hears: Members
    accepted: Vote | None = None


class Refuse(StrictModel):
    """I have promised a higher ballot: this one."""

    type: Literal["member-refuse"] = "member-refuse"
    generation: Ballot
    ballot: Ballot


class Accept(StrictModel):
    type: Literal["member-accept"] = "member-accept"
    generation: Ballot
    ballot: Ballot
    successor: Generation


class Accepted(StrictModel):
    type: Literal["member-accepted"] = "member-accepted"
    generation: Ballot
    ballot: Ballot


class Announce(StrictModel):
    """Decided: this generation exists. Told to everybody who seems not to know it."""

    type: Literal["member-announce"] = "member-announce"
    generation: Generation


Why = Literal["leave", "ranks", "suspend", "restart", "elsewhere"]


class Resign(StrictModel):
    """I give up my vote on what follows this generation, for ever; it counts as a promise to every ballot."""

    type: Literal["member-resign"] = "member-resign"
    generation: Ballot
    why: Why
    promised: Ballot
    accepted: Vote | None = None


Message = Heartbeat | Alarm | Prepare | Promise | Refuse | Accept | Accepted | Announce | Resign

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message) -> dict[str, Any]:
    """As `control.channel` carries it."""
    document: dict[str, Any] = message.model_dump(mode="json")
    return document


def decode(document: dict[str, Any]) -> Message:
    """Refuses what we would not have said: another type, an unknown field, a number out of range."""
    text = json.dumps(document)
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"{len(text)} bytes")
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise _broken(f"{error.error_count()} fields are wrong") from None
    except ValueError as error:
        raise _broken(str(error)) from None


def _broken(how: str) -> ControlError:
    return ControlError(
        f"a message about membership that cannot be read: {how}",
        why="the other side has another version of shoal, or is not shoal",
        fix="bring all machines to the same versions: shoal setup HOSTS",
    )

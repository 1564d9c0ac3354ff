"""What a launcher tells an agent: first who it is, then whom to meet and what to start.

One JSON line each, over the agent's standard input, which is a pipe on this machine or SSH to another one: the only
ways by which anything is started. What the agent has to say goes into its journal in the run folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from shoal.config.schema import MembersConfig
from shoal.control.membership.settings import MembershipSettings
from shoal.errors import ControlError
from shoal.run_folder import RANK_LIMIT, is_plain_name

# The two wishes that may follow later, each a line of its own.
STOP = "stop"
END = "end"

Order = TypeVar("Order")


def _plain(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"{name[:60]!a} cannot be used as a file name")
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text[:60]!a} has control characters")
    return text


# What other machines send becomes paths, rank numbers and addresses: refused where it is read, not where it is used.
PlainName = Annotated[str, AfterValidator(_plain)]
Word = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
Number = Annotated[int, Field(ge=0, lt=RANK_LIMIT)]
Port = Annotated[int, Field(ge=0, lt=2**16)]
MOST_PLACES = 4096


@dataclass(frozen=True)
class MeetOrder:
    """`launch` tells this launch of a run from earlier ones; `launched_at` is the launcher's clock, the base of all
    times in the logs. `script_port` is where the agent serves torch's own store for a script: 0 for any.
    `life`: how often this agent was started again; `port`: where it listened before that."""

    folder: str
    node: PlainName
    member: Number
    address: Word
    interface: Word | None
    token: str
    launch: Word
    launched_at: float
    config: Word
    data: Word
    script_port: Port | None = None
    life: Number = 0
    port: Port = 0


@dataclass(frozen=True)
class RosterEntry:
    """Where a member's agent listens. `ranks` are the numbers of the ranks that the launch gave it. `life` counts how
    often its agent was started again: the address of a later life is the one that counts."""

    node: PlainName
    address: Word
    port: Port
    mark: Word
    ranks: Annotated[tuple[Number, ...], Field(max_length=MOST_PLACES)] = ()
    life: Number = 0


@dataclass(frozen=True)
class StartProcess:
    """One process for the agent to start. `store`: it meets its peers through the agents' own store."""

    name: PlainName
    ranks: tuple[Number, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    store: bool = False

    @property
    def is_script_rank(self) -> bool:
        """Whether it is a rank of a user's script, which meets the others at torch's own store."""
        return not self.store and "MASTER_PORT" in self.env


@dataclass(frozen=True)
class MembershipOrder:
    """How machines may come and go in this run. `restarts`: how often a killed rank is started again. `above`: the
    highest number of a generation in earlier launches, so that none is used twice."""

    rules: MembershipSettings
    restarts: Number = 3
    above: Annotated[int, Field(ge=0, lt=2**53)] = 0


@dataclass(frozen=True)
class GoOrder:
    """`roster` are the founders. Without `members`, whoever is lost ends the run. `guests` are those who came later, as
    far as whoever gave this order knew of them. `grace_s`: how long ranks may take to end once they are asked to stop;
    None: as long as they like, since shoal's own ranks always answer."""

    roster: tuple[RosterEntry, ...]
    starts: tuple[StartProcess, ...]
    members: MembershipOrder | None = None
    guests: dict[Number, RosterEntry] = field(default_factory=dict)
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def places(self) -> dict[int, RosterEntry]:
        return {**dict(enumerate(self.roster)), **self.guests}

    def at(self, places: Mapping[int, RosterEntry]) -> GoOrder:
        """The same where everybody listens now."""
        roster = tuple(places.get(member, founder) for member, founder in enumerate(self.roster))
        newcomers = {member: place for member, place in places.items() if member >= len(roster)}
        return replace(self, roster=roster, guests=newcomers)


def membership(config: MembersConfig, above: int, most_ranks: int) -> MembershipOrder:
    rules = MembershipSettings(
        silent_after_s=config.silent_after_s,
        on_silent_tie=config.on_silent_tie,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        most_ranks=most_ranks,
    )
    return MembershipOrder(rules, config.restarts, above)


def to_line(order: MeetOrder | GoOrder | str) -> bytes:
    document: dict[str, Any] = {"wish": order} if isinstance(order, str) else {type(order).__name__: asdict(order)}
    return json.dumps(document).encode() + b"\n"


def read_meet(line: bytes) -> MeetOrder:
    return _read(MeetOrder, line)


def read_go(line: bytes) -> GoOrder:
    return _read(GoOrder, line)


def read_wish(line: bytes) -> str:
    """Nothing for an order that is no wish."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(document.get("wish", "")) if isinstance(document, dict) else ""


def read_member(said: dict[str, Any]) -> RosterEntry:
    """ValueError for what no member is."""
    return TypeAdapter(RosterEntry).validate_json(json.dumps(said), strict=True)


def read_places(said: Mapping[str, Any]) -> dict[int, RosterEntry]:
    """Members by their ids, as JSON has them: with ids as text. ValueError for what no such table is."""
    if not isinstance(said, dict) or len(said) > MOST_PLACES:
        raise ValueError(f"no table of at most {MOST_PLACES} members")
    if wrong := [key for key in said if not (key.isascii() and key.isdecimal() and len(key) <= 10)]:
        raise ValueError(f"{wrong[0][:20]!a} is no id of a member")
    places = {int(key): read_member(entry) for key, entry in said.items()}
    if any(member >= RANK_LIMIT for member in places):
        raise ValueError("an id of a member is too large")
    return places


def read_membership(said: dict[str, Any] | None) -> MembershipOrder | None:
    return TypeAdapter(MembershipOrder).validate_json(json.dumps(said), strict=True) if said else None


def _read(kind: type[Order], line: bytes) -> Order:
    try:
        return TypeAdapter(dict[str, kind]).validate_json(line, strict=True)[kind.__name__]  # type: ignore[valid-type]
    except (ValueError, KeyError) as error:
        raise ControlError(
            f"an agent got an order that it cannot read: {str(error).splitlines()[0]}",
            why="launcher and agent are of different versions of shoal",
            fix="bring all machines to the same one: shoal setup HOSTS",
        ) from None


async def read_stdin() -> asyncio.StreamReader:
    # A plan for many ranks is one line; the default limit of 64 kB would cut it.
    reader = asyncio.StreamReader(limit=16 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader

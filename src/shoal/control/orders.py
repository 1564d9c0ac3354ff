"""Orders from a launcher to an agent: `MeetOrder` says who it is, `GoOrder` whom to meet and what to start.

Each is one JSON line on the agent's standard input, which is a pipe on this machine, SSH to another one, or a step of
Slurm: processes are started in no other way, except among the pods of a Kubernetes Job (`cluster.pods.server`). The
agent reports through its journal in the run folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from shoal.config.defaults import HUNG_TRIES, RESTARTS
from shoal.config.schema import MembersConfig
from shoal.control.channel import SAME_VERSIONS, seal, unseal
from shoal.control.membership.settings import MembershipSettings
from shoal.errors import ControlError, RunFailed
from shoal.run_folder import RANK_LIMIT, RunFolder, is_plain_name, write_durably

# Requests that may follow later, each a line of its own: stop after the step, or end at once.
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


# Values from other machines become paths, rank numbers and addresses: they are validated where they are read.
PlainName = Annotated[str, AfterValidator(_plain)]
Word = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
Number = Annotated[int, Field(ge=0, lt=RANK_LIMIT)]
Port = Annotated[int, Field(ge=0, lt=2**16)]
MAX_MEMBERS_LISTED = 4096


@dataclass(frozen=True)
class StartProcess:
    """One process for the agent to start."""

    name: PlainName
    ranks: tuple[Number, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    store: bool = False  # it meets its peers through the agents' own store

    @property
    def is_script_rank(self) -> bool:
        """Whether it is a rank of a user's script, which uses torch's own store."""
        return not self.store and "MASTER_PORT" in self.env


@dataclass(frozen=True)
class MeetOrder:
    folder: str
    node: PlainName
    member: Number
    address: Word
    interface: Word | None
    token: str
    launch: Word  # distinguishes this launch of a run from earlier ones
    launched_at: float  # by the launcher's clock: the base of all times in the logs
    config: Word
    data: Word
    script_port: Port | None = None  # where the agent serves torch's own store for a script; 0: any port
    life: Number = 0  # how often this agent was restarted
    port: Port = 0  # where it listened before that
    expected: StartProcess | None = None  # the node's first rank as far as it is planned: its imports can begin


@dataclass(frozen=True)
class RosterEntry:
    """Where a member's agent listens."""

    node: PlainName
    address: Word
    port: Port
    mark: Word  # see `Hello.mark`
    ranks: Annotated[
        tuple[Number, ...], Field(max_length=MAX_MEMBERS_LISTED)
    ] = ()  # the numbers of its ranks in the launch
    life: Number = 0  # how often its agent was restarted: the address of a later life replaces an earlier one


@dataclass(frozen=True)
class MembershipOrder:
    """How nodes may come and go in this run."""

    settings: MembershipSettings
    restarts: Number = RESTARTS  # how often a killed rank is restarted
    above: Annotated[int, Field(ge=0, lt=2**53)] = 0  # the highest generation of earlier launches: none is used twice
    # Losses do not end the run from its start. False for a script that may begin no session: only from a session on.
    from_start: bool = True
    hung_tries: Number = HUNG_TRIES  # timeouts that a rank may cause in a row before it is killed; 0: any number


@dataclass(frozen=True)
class GoOrder:
    roster: tuple[RosterEntry, ...]  # the nodes of the launch
    starts: tuple[StartProcess, ...]
    # None: the loss of a node ends the run. For a script: from the moment when its ranks begin a session.
    members: MembershipOrder | None = None
    guests: dict[Number, RosterEntry] = field(default_factory=dict)  # nodes that joined later, as far as known
    # How long ranks may take to end after they are asked to stop; None: unlimited, since shoal's own ranks answer.
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @property
    def is_script(self) -> bool:
        return any(start.is_script_rank for start in self.starts)

    def launch_places(self) -> dict[int, RosterEntry]:
        return dict(enumerate(self.roster))

    def places(self) -> dict[int, RosterEntry]:
        return {**self.launch_places(), **self.guests}

    def at(self, places: Mapping[int, RosterEntry]) -> GoOrder:
        """Return the order with the agents' present addresses."""
        roster = tuple(places.get(member, entry) for member, entry in enumerate(self.roster))
        guests = {member: place for member, place in places.items() if member >= len(roster)}
        return replace(self, roster=roster, guests=guests)


def make_membership_order(
    config: MembersConfig, above: int, most_ranks: int, from_start: bool = True
) -> MembershipOrder:
    settings = MembershipSettings(
        silent_after_s=config.silent_after_s,
        on_silent_tie=config.on_silent_tie,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_ranks=most_ranks,
    )
    return MembershipOrder(settings, config.restarts, above, from_start, config.hung_tries)


def to_line(order: MeetOrder | GoOrder | str) -> bytes:
    document: dict[str, Any] = {"request": order} if isinstance(order, str) else {type(order).__name__: asdict(order)}
    return json.dumps(document).encode() + b"\n"


def read_meet(line: bytes) -> MeetOrder:
    return _read(MeetOrder, line)


def read_go(line: bytes) -> GoOrder:
    return _read(GoOrder, line)


def read_request_line(line: bytes) -> str:
    """Return the request of a line; empty for an order."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(document.get("request", "")) if isinstance(document, dict) else ""


def seal_token(line: bytes, code: str) -> bytes:
    """Return a line for a connection that is not encrypted: the token of a run is, for those that know the code."""
    return _change_token(line, code, seal)


def unseal_token(line: bytes, code: str) -> bytes:
    return _change_token(line, code, unseal)


def _change_token(line: bytes, code: str, change: Callable[[str, str], str]) -> bytes:
    document = json.loads(line)
    if (meet := document.get(MeetOrder.__name__)) is None:
        return line
    return json.dumps({MeetOrder.__name__: {**meet, "token": change(meet["token"], code)}}).encode() + b"\n"


def read_member(document: dict[str, Any]) -> RosterEntry:
    """Validate a roster entry; ValueError for an invalid one."""
    return TypeAdapter(RosterEntry).validate_json(json.dumps(document), strict=True)


def read_places(document: Mapping[str, Any]) -> dict[int, RosterEntry]:
    """Validate a table of members by id, which JSON writes as text; ValueError for an invalid one."""
    if not isinstance(document, dict) or len(document) > MAX_MEMBERS_LISTED:
        raise ValueError(f"no table of at most {MAX_MEMBERS_LISTED} members")
    if wrong := [key for key in document if not (key.isascii() and key.isdecimal() and len(key) <= 10)]:
        raise ValueError(f"{wrong[0][:20]!a} is no id of a member")
    places = {int(key): read_member(entry) for key, entry in document.items()}
    if any(member >= RANK_LIMIT for member in places):
        raise ValueError("an id of a member is too large")
    return places


def read_membership(document: dict[str, Any] | None) -> MembershipOrder | None:
    return TypeAdapter(MembershipOrder).validate_json(json.dumps(document), strict=True) if document else None


def save_orders(run: RunFolder, meet: MeetOrder, go: GoOrder) -> None:
    """Write the orders with which an agent can be restarted: atomically, and readable only by their owner, because
    they contain the run's token."""
    path = run.orders(meet.node)
    write_durably(path, to_line(meet) + to_line(go), path.with_name(f".{path.name}.new"), 0o600)


def move_orders(run: RunFolder, node: str, addresses: Mapping[str, str]) -> None:
    """Change the addresses, by node, in the orders with which an agent is started again."""
    meet, go = read_orders(run, node)
    places = {
        member: replace(place, address=addresses.get(place.node, place.address))
        for member, place in go.places().items()
    }
    moved = replace(meet, address=addresses.get(node, meet.address), life=meet.life - 1)
    save_orders(run, moved, go.at(places))


def read_orders(run: RunFolder, node: str) -> tuple[MeetOrder, GoOrder]:
    """Read the saved orders for the agent's next life."""
    try:
        first, second = run.orders(node).read_bytes().splitlines()
        meet, go = read_meet(first), read_go(second)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(
            f"{node} cannot take part in {run.path} again: {run.orders(node)} cannot be read",
            why=getattr(error, "strerror", None) or "its agent has ended as it should, or the file is damaged",
            fix="if the run goes on elsewhere, let this machine join as a new one: shoal host RUN, there",
        ) from None
    return replace(meet, life=meet.life + 1), go


def _read(kind: type[Order], line: bytes) -> Order:
    try:
        return TypeAdapter(dict[str, kind]).validate_json(line, strict=True)[kind.__name__]  # type: ignore[valid-type]
    except (ValueError, KeyError) as error:
        raise ControlError(
            f"an agent got an order that it cannot read: {str(error).splitlines()[0]}",
            why="launcher and agent are of different versions of shoal",
            fix=SAME_VERSIONS,
        ) from None


async def read_stdin() -> asyncio.StreamReader:
    # An order for many ranks is one line; the default limit of 64 kB would cut it.
    reader = asyncio.StreamReader(limit=16 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader

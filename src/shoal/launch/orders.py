"""What a launcher tells an agent: first who it is, then whom to meet and what to start.

One JSON line each, over the agent's standard input, which is a pipe on this machine or SSH to another one: the only
ways by which anything is started. What the agent has to say goes into its journal in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from shoal.errors import ControlError
from shoal.launch.plan import Command

# The two wishes that may follow later, each a line of its own.
STOP = "stop"
END = "end"

Order = TypeVar("Order")


@dataclass(frozen=True)
class Meet:
    """`launch` tells this launch of a run from earlier ones; `launched_at` is the launcher's clock, the base of all
    times in the logs. `script_port` is where rank 0 of somebody's script will serve torch's own store: 0 for any."""

    folder: str
    node: str
    member: int
    address: str
    interface: str | None
    token: str
    launch: str
    launched_at: float
    config: str
    data: str
    script_port: int | None = None


@dataclass(frozen=True)
class Member:
    node: str
    address: str
    port: int
    mark: str


@dataclass(frozen=True)
class Start:
    """One process for the agent to start. `store`: it meets its peers through the agents' own store."""

    name: str
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    store: bool = False


@dataclass(frozen=True)
class Go:
    roster: tuple[Member, ...]
    starts: tuple[Start, ...]


def as_start(command: Command) -> Start:
    return Start(command.name, command.ranks, command.argv, command.env, command.uses_agent_store)


def to_line(order: Meet | Go | str) -> bytes:
    document: dict[str, Any] = {"wish": order} if isinstance(order, str) else {type(order).__name__: asdict(order)}
    return json.dumps(document).encode() + b"\n"


def read_meet(line: bytes) -> Meet:
    return _read(Meet, line)


def read_go(line: bytes) -> Go:
    return _read(Go, line)


def read_wish(line: bytes) -> str:
    """Nothing for an order that is no wish."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(document.get("wish", "")) if isinstance(document, dict) else ""


def _read(kind: type[Order], line: bytes) -> Order:
    try:
        return TypeAdapter(dict[str, kind]).validate_json(line, strict=True)[kind.__name__]  # type: ignore[valid-type]
    except (ValueError, KeyError) as error:
        raise ControlError(
            f"an agent got an order that it cannot read: {str(error).splitlines()[0]}",
            why="launcher and agent are of different versions of shoal",
            fix="bring all machines to the same one: shoal setup HOSTS",
        ) from None


def make_go(roster: Sequence[Member], commands: Sequence[Command], node: str) -> Go:
    """The part of the plan that one node carries out."""
    return Go(tuple(roster), tuple(as_start(command) for command in commands if command.node.name == node))

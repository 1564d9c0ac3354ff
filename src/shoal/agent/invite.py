"""An agent as the sponsor of new machines: a command on its own machine asks it for an id, through a socket in the run
folder that only its owner can open. Nobody else may hand out ids: the count of guests is part of the agent's promises.

One JSON line each way: {"ask": "who"} or {"ask": "id"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from shoal.agent.mesh import AgentAddresses
from shoal.control.orders import RosterEntry
from shoal.errors import ControlError, RunFailed, ShoalError, UsageError, from_dict

WHO = "who"
ID = "id"
_ANSWER_WITHIN_S = 10.0
_MOST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True)
class InviteReply:
    """`places` is where all agents listen that the sponsor knows of. `full`: no machine is let in before one leaves.
    `member` is the new id, where one was asked for."""

    places: dict[int, RosterEntry] = field(default_factory=dict)
    full: bool = False
    member: int | None = None


class GuestAdmission(Protocol):
    """What the agent's council says of guests."""

    def takes_nobody(self) -> str: ...
    def is_full(self) -> bool: ...
    def invite(self) -> int: ...


class InviteServer:
    """The agent's end."""

    def __init__(self, path: Path, host: GuestAdmission, places: AgentAddresses) -> None:
        self._path = path
        self._host = host
        self._places = places
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Raises OSError where the disk takes no sockets."""
        # One that was left by an agent that was killed.
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            with _short(self._path) as name:
                listener.bind(name)
        finally:
            os.umask(before)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                line = await reader.readline()
                writer.write(json.dumps(self._reply(line)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass
        finally:
            writer.close()

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            return asdict(self._answer(json.loads(line)["ask"]))
        except ShoalError as error:
            return {"refused": error.as_dict()}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"refused": ControlError("an agent was asked something that it cannot read").as_dict()}

    def _answer(self, question: str) -> InviteReply:
        if why := self._host.takes_nobody():
            raise UsageError("the run takes nobody in", why=why)
        places = {member: self._places[member] for member in self._places}
        return InviteReply(places, self._host.is_full(), self._invite() if question == ID else None)

    def _invite(self) -> int:
        try:
            return self._host.invite()
        except OSError as error:
            raise RunFailed(
                f"the agent cannot write down that it gave out an id: {error.strerror}",
                why="without that it might give it out twice",
                fix="make room on the disk of this machine: df -h",
            ) from error


def ask(path: Path, question: str) -> InviteReply:
    """Raises OSError when nobody answers there, and what the agent says is wrong."""
    with socket.socket(socket.AF_UNIX) as asking, _short(path) as name:
        asking.settimeout(_ANSWER_WITHIN_S)
        asking.connect(name)
        asking.sendall(json.dumps({"ask": question}).encode() + b"\n")
        with asking.makefile("rb") as lines:
            line = lines.readline(_MOST_ANSWER_BYTES)
    try:
        document = json.loads(line)
        if "refused" in document:
            raise from_dict(document["refused"])
        return TypeAdapter(InviteReply).validate_json(line, strict=True)
    except (ValueError, TypeError):
        raise ControlError(
            f"the agent at {path} answered what cannot be read", why="it ended meanwhile, or is of another version"
        ) from None


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for it that fits: a socket's has at most 107 bytes, and a run folder may lie deep."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

"""Invite new nodes: `shoal host RUN` asks the agent on its own machine for a member id, through a socket in the run
folder that only its owner can open.

Only the agent gives out ids, because the number of ids it gave is part of its durable vote record. One JSON line each
way: {"ask": "who"} or {"ask": "id"}.
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
from shoal.control.membership.settings import INVITE_TIMEOUT_S
from shoal.control.orders import RosterEntry
from shoal.errors import ControlError, RunFailed, ShoalError, UsageError, from_dict

WHO = "who"
ID = "id"
_MAX_REPLY_BYTES = 16 << 20


@dataclass(frozen=True)
class InviteReply:
    places: dict[int, RosterEntry] = field(default_factory=dict)  # the known agents and where they listen
    full: bool = False  # no node can join before another leaves
    member: int | None = None  # the new id, if one was requested


class JoinAdmission(Protocol):
    """The part of `AgentMembership` that decides on new nodes."""

    def why_closed(self) -> str: ...
    def is_full(self) -> bool: ...
    def invite(self) -> int: ...


class InviteServer:
    def __init__(self, path: Path, admission: JoinAdmission, places: AgentAddresses) -> None:
        self._path = path
        self._admission = admission
        self._places = places
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; OSError where the disk does not support sockets."""
        # A killed agent may have left one.
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            with _short_path(self._path) as name:
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
            async with asyncio.timeout(INVITE_TIMEOUT_S):
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
            return {"refused": ControlError("an agent received a request that it cannot read").as_dict()}

    def _answer(self, question: str) -> InviteReply:
        if why := self._admission.why_closed():
            raise UsageError("no machine can join the run", why=why)
        places = {member: self._places[member] for member in self._places}
        return InviteReply(places, self._admission.is_full(), self._invite() if question == ID else None)

    def _invite(self) -> int:
        try:
            return self._admission.invite()
        except OSError as error:
            raise RunFailed(
                f"the agent cannot write to disk that it gave out an id: {error.strerror}",
                why="without that it might give the id out twice",
                fix="make room on the disk of this machine: df -h",
            ) from error


def ask_agent(path: Path, question: str) -> InviteReply:
    """Ask the agent at this socket. Raises OSError when no agent answers, and the error that the agent replies."""
    with socket.socket(socket.AF_UNIX) as client, _short_path(path) as name:
        client.settimeout(INVITE_TIMEOUT_S)
        client.connect(name)
        client.sendall(json.dumps({"ask": question}).encode() + b"\n")
        with client.makefile("rb") as lines:
            line = lines.readline(_MAX_REPLY_BYTES)
    try:
        document = json.loads(line)
        if "refused" in document:
            raise from_dict(document["refused"])
        return TypeAdapter(InviteReply).validate_json(line, strict=True)
    except (ValueError, TypeError):
        raise ControlError(
            f"the reply of the agent at {path} cannot be read", why="it ended meanwhile, or has another version"
        ) from None


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Return a short name of the socket: at most 107 bytes are allowed, and a run folder may lie deep."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

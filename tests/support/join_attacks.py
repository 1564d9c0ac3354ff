"""Both sides of a join as an attacker over the real channel: a malicious host and a malicious guest."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.config.load import build_config, parse_set
from shoal.config.load import merge as merge_settings
from shoal.control.channel import Channel, Message, accept, dial, seal
from shoal.control.handshake import make_hello
from shoal.control.invitation import make_code
from shoal.data.prepare import create_run
from shoal.run_folder import RunFolder
from shoal.runs.supervisor import training_files
from tests.support.programs import TINY, shoal_command

# One per test process: tests that search /proc for the code run beside tests that expose it there.
CODE = make_code()
TOKEN = "ab" * 32
Change = Callable[[Message], None]


def make_training(folder: Path) -> RunFolder:
    """Create a run folder with an encoded text, as a host has it before the first machine joins."""
    return create_run(build_config(flags=merge_settings(map(parse_set, TINY))), folder, 2)


class MaliciousHost:
    """A host that follows the protocol except for one change in every message of a kind."""

    def __init__(self, run: RunFolder, changes: dict[str, Change], late: bool = False, hold_s: float = 0.0) -> None:
        self.cargo = training_files(run)
        self._changes = changes
        self._late = late
        self._hold_s = hold_s
        self.received: list[Message] = []
        self.greeted = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> MaliciousHost:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = starting.result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def kinds(self) -> list[str]:
        return [str(message.get("type", "facts")) for message in self.received]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            await self._play(await accept(reader, writer, CODE))
        writer.close()

    async def _play(self, channel: Channel) -> None:
        facts = await self._receive(channel)
        self.greeted.set()
        await asyncio.sleep(self._hold_s)
        texts = self.cargo.texts({name: name for name in self.cargo.files})
        sizes = {name: path.stat().st_size for name, path in self.cargo.files.items()}
        node = str(facts["name"])
        await self._send(channel, "welcome", node=node, texts=texts, files=sizes, late=self._late)
        need = await self._receive(channel)
        for name in need.get("need", []):
            data = base64.b64encode(self.cargo.files[name].read_bytes()).decode()
            await self._send(channel, "piece", path=name, offset=0, data=data)
        answer = await self._receive(channel)
        while answer.get("type") != "prepared":
            answer = await self._receive(channel)
        more = {"config": "c" * 64, "data": need_digest(sizes)} if self._late else {}
        place = 70 if self._late else 1
        await self._send(
            channel, "meet", member=place, launch="abcd", launched_at=1.0, sealed=seal(TOKEN, CODE), **more
        )
        us = {"node": "host", "address": "127.0.0.1", "port": 9, "mark": "m" * 32, "ranks": [0], "life": 0}
        them = {**us, "node": node, "mark": "n" * 32, "ranks": [1]}
        others: Message = {"guests": {}} if self._late else {"resume": False}
        await self._send(channel, "roster", roster=[us] if self._late else [us, them], members=None, **others)
        while True:
            await self._receive(channel)

    async def _send(self, channel: Channel, kind: str, **fields: Any) -> None:
        message = {"type": kind, **fields}
        if kind in self._changes:
            self._changes[kind](message)
        await channel.send(message)

    async def _receive(self, channel: Channel) -> Message:
        self.received.append(await channel.receive())
        return self.received[-1]

    def heard(self, secret: bytes) -> bool:
        """Return whether a secret was received, plain or in a piece of a file."""
        pieces = [base64.b64decode(str(message.get("data", ""))) for message in self.received]
        return any(secret in piece for piece in [*pieces, repr(self.received).encode()])


def need_digest(sizes: dict[str, int]) -> str:
    return next(iter(sizes)).partition("-")[0]


@contextlib.contextmanager
def joining(place: str, home: Path, out: Path, code: str = CODE, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a real `shoal join` with its own home and cache; the code is written to its standard input."""
    env = {**os.environ, "PYTHONWARNINGS": "", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **variables}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(shoal_command("join", place, "--out", out), env=env, text=True, **pipes)  # type: ignore[call-overload]
    try:
        if code:
            process.stdin.write(f"{code}\n")
            process.stdin.close()
            process.stdin = None
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


class MaliciousGuest:
    """A machine that has the code and sends arbitrary messages."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @classmethod
    async def dial(cls, port: int, code: str, **changes: Any) -> MaliciousGuest:
        channel = await dial("127.0.0.1", port, code)
        facts = {"hello": asdict(make_hello(0, "den", "", "", "")), "name": "den", "address": "127.0.0.1"}
        await channel.send({**facts, "user": "anna", **changes})
        return cls(channel)

    async def settle(self) -> Message:
        """Receive until the host has sent everything; return its welcome."""
        welcome = await self.channel.receive()
        if welcome.get("type") == "welcome":
            await self.channel.send({"type": "need", "need": []})
            await self.channel.send({"type": "prepared"})
        return welcome

    async def send_piece(self, path: object, offset: object, data: bytes | str = b"x") -> None:
        encoded = base64.b64encode(data).decode() if isinstance(data, bytes) else data
        await self.channel.send({"type": "piece", "path": path, "offset": offset, "data": encoded})

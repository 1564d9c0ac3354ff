"""Raw sockets at an agent's port: replays are refused, a flood keeps no member out, no resource leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.control import channel as control_channel
from shoal.control.channel import Channel, dial
from shoal.control.connection_guard import accept_connection, make_connection_guard
from shoal.errors import ControlError
from tests.unit.agent.test_mesh import TOKEN, Peer

LOOPBACK = "127.0.0.1"
DEADLINE_S = 20.0


class Port:
    """A port with a connection guard. `met` holds the accepted channels."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.met: asyncio.Queue[Channel] = asyncio.Queue()
        self.guard = make_connection_guard(self.notes.append)
        self.number = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if channel := await accept_connection(reader, writer, TOKEN, self.guard):
            self.met.put_nowait(channel)


@contextlib.asynccontextmanager
async def open_port() -> AsyncIterator[Port]:
    port = Port()
    server = await asyncio.start_server(port.accept, LOOPBACK, 0)
    port.number = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        server.close()
        while not port.met.empty():
            port.met.get_nowait().close()
        await asyncio.sleep(0.02)


def connect(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=DEADLINE_S)


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the other side closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while block := connection.recv(65536):
            received += block
    return received


class Tap:
    """Forward between a caller and the port, and record the caller's bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.recorded = b""

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection(LOOPBACK, self._port)
        await asyncio.gather(self._pump(reader, out, True), self._pump(there, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
        while block := await reader.read(65536):
            self.recorded += block if keep else b""
            writer.write(block)
        writer.close()


async def record(port: Port) -> bytes:
    tap = Tap(port.number)
    server = await asyncio.start_server(tap.forward, LOOPBACK, 0)
    caller = await dial(LOOPBACK, server.sockets[0].getsockname()[1], TOKEN)
    await caller.send({"type": "failed"})
    met = await port.met.get()
    assert await met.receive() == {"type": "failed"}
    caller.close()
    met.close()
    server.close()
    await asyncio.sleep(0.05)
    return tap.recorded


def run_with_deadline(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


def test_a_replayed_handshake_and_message_on_a_new_connection_are_refused() -> None:
    async def scenario() -> None:
        async with open_port() as port:
            recorded = await record(port)
            with connect(port.number) as replayed:
                replayed.sendall(recorded)
                received = await asyncio.to_thread(read_to_end, replayed)
            assert received.count(b"nonce") <= 1
            assert b"proof" not in received
            assert port.met.empty()
            assert [note for note in port.notes if "does not know this run's token" in note] == port.notes

    run_with_deadline(scenario())


def test_a_replayed_message_on_the_same_connection_is_refused() -> None:
    async def scenario() -> None:
        async with open_port() as port:
            caller = await dial(LOOPBACK, port.number, TOKEN)
            met = await port.met.get()
            payload = b'{"type":"failed"}'
            frame = struct.pack(">I", len(payload)) + control_channel._tag(caller._send_key, 0, payload) + payload
            for _ in range(3):
                caller._writer.write(frame)
            assert await met.receive() == {"type": "failed"}
            with pytest.raises(ControlError, match="does not carry the run's tag"):
                await met.receive()
            with pytest.raises(ControlError, match="an earlier message"):
                await met.receive()
            caller.close()
            met.close()

    run_with_deadline(scenario())


@pytest.mark.parametrize(
    ("frame", "ends_with"),
    [
        (struct.pack(">I", 0xFFFFFFFF), ControlError),
        (struct.pack(">I", (8 << 20) + 1) + bytes(100), ControlError),
        (struct.pack(">I", 10) + bytes(20), EOFError),
        (b"\0\0", EOFError),
    ],
    ids=["4 GB", "a byte too many", "truncated", "half a length"],
)
def test_a_malformed_frame_ends_the_channel(frame: bytes, ends_with: type[Exception]) -> None:
    async def scenario() -> None:
        async with open_port() as port:
            caller = await dial(LOOPBACK, port.number, TOKEN)
            met = await port.met.get()
            caller._writer.write(frame)
            caller._writer.write_eof()
            with pytest.raises(ends_with):
                await met.receive()
            caller.close()
            met.close()

    run_with_deadline(scenario())


def test_a_handshake_sent_byte_by_byte_gets_no_extra_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "HANDSHAKE_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with open_port() as port:
            handshake, sent = struct.pack(">I", 500) + bytes(500), 0
            with connect(port.number) as slow, contextlib.suppress(OSError):
                for sent, byte in enumerate(handshake):  # noqa: B007
                    slow.sendall(bytes([byte]))
                    await asyncio.sleep(0.05)
            assert sent < len(handshake) - 1, "the connection was kept while bytes arrived"
            assert port.notes == [f"refused a connection from {LOOPBACK}: its handshake took too long"]
            assert port.guard.waiting == 0

    run_with_deadline(scenario())


def test_sending_to_a_peer_that_never_reads_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "SEND_STALLED_AFTER_S", 0.3)

    async def scenario() -> None:
        async with open_port() as port:
            caller = await dial(LOOPBACK, port.number, TOKEN)
            caller._writer.transport.pause_reading()  # type: ignore[attr-defined]
            met = await port.met.get()
            with pytest.raises(TimeoutError):
                await send_40_mib(met)
            assert met.is_closed()
            assert met._writer.transport.get_write_buffer_size() == 0
            caller.close()

    run_with_deadline(scenario())


async def send_40_mib(channel: Channel) -> None:
    for _ in range(40):
        await channel.send({"text": "x" * (1 << 20)})


@pytest.mark.parametrize("field", ["torch", "shoal", "config", "data", "protocol"])
def test_a_member_that_differs_is_refused_at_once_with_both_versions_named(field: str) -> None:
    """Both sides raise the error, the dialling and the dialled one."""
    peers = [Peer(0), Peer(1)]
    other_value: Any = 7 if field == "protocol" else "another-version"
    own_value = getattr(peers[0]._me, field)
    peers[1]._me = replace(peers[1]._me, **{field: other_value})

    async def scenario() -> None:
        roster = [await peer.listen() for peer in peers]
        ends = await asyncio.gather(
            *(peer.mesh.meet(dict(enumerate(roster))) for peer in peers), return_exceptions=True
        )
        # The error of a meeting that timed out names no version.
        for end in ends:
            assert isinstance(end, ControlError)
            assert f"{own_value} on node1" in end.seen
            assert f"{other_value} on node2" in end.seen
        for peer in peers:
            await peer.mesh.close()
        await asyncio.sleep(0.05)

    run_with_deadline(scenario())


def open_files() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


def test_a_flood_keeps_no_member_out_and_leaks_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flood comes before and after the members meet, from the members' own address."""
    monkeypatch.setattr(control_channel, "HANDSHAKE_TIMEOUT_S", 1.0)
    peers = [Peer(0), Peer(1), Peer(2)]

    async def scenario() -> None:
        roster = [await peer.listen() for peer in peers]
        before = open_files()
        idle = await asyncio.to_thread(lambda: [connect(roster[0].port) for _ in range(200)])
        noise = asyncio.ensure_future(asyncio.to_thread(make_noise, roster[0].port, 300))
        await asyncio.gather(*(peer.mesh.meet(dict(enumerate(roster))) for peer in peers))
        await peers[1].mesh.broadcast({"type": "news"})
        await noise
        closed = await asyncio.to_thread(lambda: [read_to_end(connection) for connection in idle])
        assert all(received.count(b"nonce") <= 1 for received in closed)
        for connection in idle:
            connection.close()
        await asyncio.sleep(0.1)
        assert peers[0].received == [(1, {"type": "news"})]
        assert open_files() <= before + 2 * len(peers), "a connection was left open"
        for peer in peers:
            assert peer.lost == []
            await peer.mesh.close()
        await asyncio.sleep(0.05)

    run_with_deadline(scenario())
    refusals = [note for note in peers[0].notes if "refused" in note]
    assert 1 <= len(refusals) <= 2, refusals
    assert refusals[-1].startswith("refused ")
    assert refusals[-1].split()[1].isdigit()


def make_noise(port: int, count: int) -> None:
    for number in range(count):
        with contextlib.suppress(OSError), connect(port) as connection:
            connection.sendall(os.urandom(64) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")

"""The control channel between agents, over real sockets: wrong tokens, noise, and an attacker between the ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest

from shoal.control import channel as control_channel
from shoal.control.channel import PROTOCOL, Channel, accept, dial
from shoal.errors import ControlError, ShoalError

LOOPBACK = "127.0.0.1"
TOKEN = "a" * 64
OTHER_TOKEN = "b" * 64
T = TypeVar("T")


class Listener:
    """Handshake with every connection; `met` has the channel or the error of each."""

    def __init__(self) -> None:
        self.met: asyncio.Queue[Channel | BaseException] = asyncio.Queue()
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.met.put_nowait(await accept(reader, writer, TOKEN))
        except (ShoalError, OSError, EOFError) as error:
            writer.close()
            self.met.put_nowait(error)

    async def channel(self) -> Channel:
        result = await self.met.get()
        assert isinstance(result, Channel), result
        return result


def run_with_timeout(scenario: Callable[[], Awaitable[T]]) -> T:
    """Run the scenario for at most 5 s, and wait until every connection is closed."""

    async def run() -> T:
        value = await asyncio.wait_for(scenario(), 5)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others), 1)
        await asyncio.sleep(0.02)
        return value

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def serving(handle: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, LOOPBACK, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    async with serving(listener.handle) as listener.port:
        yield listener


def test_peers_that_know_the_token_exchange_messages_both_ways() -> None:
    async def scenario() -> None:
        async with listening() as listener:
            caller = await dial(LOOPBACK, listener.port, TOKEN)
            callee = await listener.channel()
            large = {"text": "ü" * 300_000}
            await asyncio.gather(*(caller.send({"number": number}) for number in range(20)), callee.send(large))
            assert [(await callee.receive())["number"] for _ in range(20)] == list(range(20))
            assert await caller.receive() == large
            caller.close()
            with pytest.raises(EOFError):
                await callee.receive()
            callee.close()

    run_with_timeout(scenario)


def test_a_caller_without_the_token_is_refused_and_gets_only_the_opening() -> None:
    async def scenario() -> None:
        async with listening() as listener:
            reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            opening = await read_frame(reader)
            await write_frame(writer, {"nonce": "1" * 32, "proof": "2" * 64})
            assert await reader.read() == b"", "it received more than the opening"
            assert opening.keys() == {"shoal", "nonce"}
            assert "does not know this run's token" in str(await listener.met.get())
            writer.close()
            with pytest.raises(ControlError, match=f"{LOOPBACK}:{listener.port} refused us"):
                await dial(LOOPBACK, listener.port, OTHER_TOKEN)

    run_with_timeout(scenario)


def test_a_caller_refuses_a_listener_without_the_token() -> None:
    """Another program took the port of an agent that has ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await write_frame(writer, {"shoal": PROTOCOL, "nonce": "1" * 32})
        received.append(await read_frame(reader))
        await write_frame(writer, {"proof": received[0]["proof"]})
        writer.close()

    async def scenario() -> None:
        async with serving(answer) as port:
            with pytest.raises(ControlError, match="does not know this run's token"):
                await dial(LOOPBACK, port, TOKEN)

    received: list[dict[str, Any]] = []
    run_with_timeout(scenario)
    assert received[0].keys() == {"nonce", "proof"}
    assert TOKEN not in json.dumps(received)


@contextlib.asynccontextmanager
async def man_between(port: int, alter: Callable[[int, bytes], bytes]) -> AsyncIterator[int]:
    """Forward frames both ways; `alter` gets the caller's frames, numbered from its answer to the opening."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(LOOPBACK, port)
        back = asyncio.ensure_future(pump(server_reader, writer))
        with contextlib.suppress(EOFError, OSError):
            number = 0
            while True:
                head = await reader.readexactly(4)
                tag_and_text = int.from_bytes(head, "big") + (16 if number else 0)
                server_writer.write(alter(number, head + await reader.readexactly(tag_and_text)))
                number += 1
        server_writer.close()
        await back

    async with serving(forward) as own_port:
        yield own_port


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(65536):
            writer.write(block)
    writer.close()


class FrameEditor:
    """Record or change the caller's frames."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def keep(self, number: int, frame: bytes) -> bytes:
        self.frames.append(frame)
        return frame

    def change_a_byte(self, number: int, frame: bytes) -> bytes:
        return frame if number != 2 else frame[:-2] + b"9" + frame[-1:]

    def repeat(self, number: int, frame: bytes) -> bytes:
        return frame if number != 2 else frame + frame

    def drop(self, number: int, frame: bytes) -> bytes:
        return frame if number != 2 else b""

    def swap(self, number: int, frame: bytes) -> bytes:
        self.frames.append(frame)
        return frame if number < 2 else b"" if number == 2 else frame + self.frames[2]


@pytest.mark.parametrize(
    ("edit", "delivered"),
    [("keep", [0, 1, 2, 3]), ("change_a_byte", [0]), ("repeat", [0, 1]), ("drop", [0]), ("swap", [0])],
)
def test_a_frame_changed_in_transit_is_refused(edit: str, delivered: list[int]) -> None:
    async def scenario() -> list[int]:
        received: list[int] = []
        async with listening() as listener, man_between(listener.port, getattr(FrameEditor(), edit)) as port:
            caller = await dial(LOOPBACK, port, TOKEN)
            callee = await listener.channel()
            for number in range(4):
                await caller.send({"number": number})
            with pytest.raises(ControlError if edit != "keep" else TimeoutError) as caught:
                await receive_all(callee, received)
            assert edit == "keep" or "does not carry the run's tag" in str(caught.value)
            caller.close()
            callee.close()
        return received

    assert run_with_timeout(scenario) == delivered


def test_a_replayed_handshake_is_refused() -> None:
    async def scenario() -> None:
        editor = FrameEditor()
        async with listening() as listener, man_between(listener.port, editor.keep) as port:
            caller = await dial(LOOPBACK, port, TOKEN)
            await caller.send({"number": 1})
            callee = await listener.channel()
            assert await callee.receive() == {"number": 1}
            caller.close()
            callee.close()
            reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            writer.write(b"".join(editor.frames))
            assert "does not know this run's token" in str(await listener.met.get())
            assert len(await read_frame(reader)) == 2
            assert await reader.read() == b""
            writer.close()

    run_with_timeout(scenario)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x02[]",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x04\x00" + b"[" * 1024,
        b"\x00\x00\x00\x17" + rb'{"nonce": "\ud800"}    ',
        b"\x00\x00\x00\x17" + rb'{"proof": "\ud800"}    ',
        b"",
    ],
    ids=["http", "no JSON", "no object", "4 GB", "nested", "nonce", "proof", "closed"],
)
def test_noise_is_refused_at_once_and_the_next_caller_is_accepted(noise: bytes) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            writer.write(noise)
            writer.write_eof()
            assert isinstance(await listener.met.get(), ControlError | EOFError)
            await read_frame(reader)
            assert await reader.read() == b""
            writer.close()
            (await dial(LOOPBACK, listener.port, TOKEN)).close()
            (await listener.channel()).close()

    run_with_timeout(scenario)


def test_a_peer_that_sends_nothing_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def scenario() -> None:
        async with listening() as listener, serving(stay_silent) as silent_port:
            _, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            assert isinstance(await listener.met.get(), TimeoutError)
            with pytest.raises(TimeoutError):
                await dial(LOOPBACK, silent_port, TOKEN)
            writer.close()

    run_with_timeout(scenario)


def test_another_protocol_is_refused_with_both_versions_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await write_frame(writer, {"shoal": 7, "nonce": "1" * 32})
        assert await reader.read() == b"", "it was sent a proof"
        writer.close()

    async def scenario() -> None:
        async with serving(answer) as port:
            with pytest.raises(ControlError, match=f"uses protocol 7, we use {PROTOCOL}") as caught:
                await dial(LOOPBACK, port, TOKEN)
            assert "shoal setup" in caught.value.fix

    run_with_timeout(scenario)


async def receive_all(callee: Channel, received: list[int]) -> None:
    while True:
        received.append((await asyncio.wait_for(callee.receive(), 0.5))["number"])


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    message: dict[str, Any] = json.loads(await reader.readexactly(size))
    return message


async def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    writer.write(len(payload).to_bytes(4, "big") + payload)
    await writer.drain()

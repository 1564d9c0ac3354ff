"""The control channel between agents: friends, strangers, noise, and somebody in between. Real sockets."""

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
STRANGER = "b" * 64
T = TypeVar("T")


class Listener:
    """Answers every connection with the greeting; what became of each is in `met`."""

    def __init__(self) -> None:
        self.met: asyncio.Queue[Channel | BaseException] = asyncio.Queue()
        self.port = 0

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.met.put_nowait(await accept(reader, writer, TOKEN))
        except (ShoalError, OSError, EOFError) as error:
            writer.close()
            self.met.put_nowait(error)

    async def channel(self) -> Channel:
        met = await self.met.get()
        assert isinstance(met, Channel), met
        return met


def talking(talk: Callable[[], Awaitable[T]]) -> T:
    """Whatever it is, it ends within seconds; and every connection of it is closed when the loop ends."""

    async def whole() -> T:
        value = await asyncio.wait_for(talk(), 5)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others), 1)
        await asyncio.sleep(0.02)
        return value

    return asyncio.run(whole())


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
    async with serving(listener.welcome) as listener.port:
        yield listener


def test_whoever_knows_the_token_talks_both_ways() -> None:
    async def talk() -> None:
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

    talking(talk)


def test_a_stranger_is_refused_and_is_told_nothing() -> None:
    async def call() -> None:
        async with listening() as listener:
            reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            opening = await read_frame(reader)
            await write_frame(writer, {"nonce": "1" * 32, "proof": "2" * 64})
            assert await reader.read() == b"", "it heard more than the opening"
            assert opening.keys() == {"shoal", "nonce"}
            assert "does not know this run's token" in str(await listener.met.get())
            writer.close()
            with pytest.raises(ControlError, match=f"{LOOPBACK}:{listener.port} refused us"):
                await dial(LOOPBACK, listener.port, STRANGER)

    talking(call)


def test_a_listener_that_does_not_know_the_token_is_noticed_by_the_caller() -> None:
    """Somebody took the port of an agent that has ended."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await write_frame(writer, {"shoal": PROTOCOL, "nonce": "1" * 32})
        heard.append(await read_frame(reader))
        await write_frame(writer, {"proof": heard[0]["proof"]})
        writer.close()

    async def call() -> None:
        async with serving(pretend) as port:
            with pytest.raises(ControlError, match="does not know this run's token"):
                await dial(LOOPBACK, port, TOKEN)

    heard: list[dict[str, Any]] = []
    talking(call)
    assert heard[0].keys() == {"nonce", "proof"}
    assert TOKEN not in json.dumps(heard)


@contextlib.asynccontextmanager
async def man_between(port: int, alter: Callable[[int, bytes], bytes]) -> AsyncIterator[int]:
    """Passes frames on both ways; `alter` sees those of the caller, numbered from its answer to the opening on."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async with serving(carry) as own_port:
        yield own_port


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(65536):
            writer.write(block)
    writer.close()


class Recorded:
    """The caller's frames as they passed."""

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
    ("how", "understood"),
    [("keep", [0, 1, 2, 3]), ("change_a_byte", [0]), ("repeat", [0, 1]), ("drop", [0]), ("swap", [0])],
)
def test_whatever_is_changed_on_the_way_is_noticed(how: str, understood: list[int]) -> None:
    async def talk() -> list[int]:
        heard: list[int] = []
        async with listening() as listener, man_between(listener.port, getattr(Recorded(), how)) as port:
            caller = await dial(LOOPBACK, port, TOKEN)
            callee = await listener.channel()
            for number in range(4):
                await caller.send({"number": number})
            with pytest.raises(ControlError if how != "keep" else TimeoutError) as caught:
                await hear_all(callee, heard)
            assert how == "keep" or "does not carry the run's tag" in str(caught.value)
            caller.close()
            callee.close()
        return heard

    assert talking(talk) == understood


def test_a_recorded_greeting_opens_nothing() -> None:
    async def replay() -> None:
        recorded = Recorded()
        async with listening() as listener, man_between(listener.port, recorded.keep) as port:
            caller = await dial(LOOPBACK, port, TOKEN)
            await caller.send({"number": 1})
            callee = await listener.channel()
            assert await callee.receive() == {"number": 1}
            caller.close()
            callee.close()
            reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            writer.write(b"".join(recorded.frames))
            assert "does not know this run's token" in str(await listener.met.get())
            assert len(await read_frame(reader)) == 2
            assert await reader.read() == b""
            writer.close()

    talking(replay)


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
def test_noise_ends_at_once_and_hurts_nobody(noise: bytes) -> None:
    async def call() -> None:
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

    talking(call)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def call() -> None:
        async with listening() as listener, serving(mute) as mute_port:
            _, writer = await asyncio.open_connection(LOOPBACK, listener.port)
            assert isinstance(await listener.met.get(), TimeoutError)
            with pytest.raises(TimeoutError):
                await dial(LOOPBACK, mute_port, TOKEN)
            writer.close()

    talking(call)


def test_another_protocol_is_refused_with_both_named() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await write_frame(writer, {"shoal": 7, "nonce": "1" * 32})
        assert await reader.read() == b"", "it was sent a proof"
        writer.close()

    async def call() -> None:
        async with serving(speak) as port:
            with pytest.raises(ControlError, match=f"uses protocol 7, we use {PROTOCOL}") as caught:
                await dial(LOOPBACK, port, TOKEN)
            assert "shoal setup" in caught.value.fix

    talking(call)


async def hear_all(callee: Channel, heard: list[int]) -> None:
    while True:
        heard.append((await asyncio.wait_for(callee.receive(), 0.5))["number"])


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    message: dict[str, Any] = json.loads(await reader.readexactly(size))
    return message


async def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    writer.write(len(payload).to_bytes(4, "big") + payload)
    await writer.drain()

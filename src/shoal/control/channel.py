"""An authenticated channel between two processes of one run.

Both sides know the run's token and neither sends it: each proves that it does over the other's fresh random number.
After that every message carries a tag made with a key of its own direction and its place in the stream, so nobody in
between can add, change, drop or repeat one unseen. It is not encrypted, like gloo's own traffic beside it.

It carries membership, state and logs; no message makes the other side run anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ControlError, UnknownSender

# SECTION control/token
# The run's token: whoever knows it belongs to the run. In the run folder, for its owner's eyes only.


# 16 bytes that are used once, and 32 of the token.
_SEALED = re.compile(r"[0-9a-f]{96}")


def make_token(path: Path) -> str:
    """A fresh one for every launch, readable by nobody else from the first moment."""
    token = secrets.token_hex(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def is_same(sent: str | bytes, secret: str | bytes) -> bool:
    """Compare what was sent with a secret, in a time that tells nothing about it.

    `hmac.compare_digest` raises TypeError for text that is not ASCII, and what strangers send may be any text.
    """
    return hmac.compare_digest(_as_bytes(sent), _as_bytes(secret))


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def seal(token: str, code: str) -> str:
    """The token for one who knows a one-time code; to everybody else on the way it is noise."""
    nonce = secrets.token_bytes(16)
    return (nonce + _mix(bytes.fromhex(token), code, nonce)).hex()


def unseal(sealed: object, code: str) -> str:
    """Raises `ControlError` for what `seal` would not have written."""
    if not isinstance(sealed, str) or not _SEALED.fullmatch(sealed):
        raise ControlError("the host sent no token", why="its shoal is another")
    raw = bytes.fromhex(sealed)
    return _mix(raw[16:], code, raw[:16]).hex()


def _mix(secret: bytes, code: str, nonce: bytes) -> bytes:
    """Both are as long as one digest, and a code is used once: so this is a one-time pad."""
    pad = hmac.new(code.encode(), b"shoal token " + nonce, hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(secret, pad, strict=True))


PROTOCOL = 1
Message = dict[str, Any]

_NONCE = re.compile(r"[0-9a-f]{32}")
_LENGTH = 4
_TAG = 16
_MOST_BYTES = 8 << 20
# Before a stranger has proved anything, it gets little of our memory and time.
_MOST_BYTES_FROM_STRANGERS = 1024
_GREETING_S = 5.0
# A member that a crowd pushed out gets in at the second or third try; for a stranger these change nothing.
_TRIES = 3
_AGAIN_S = 0.2
# Less than this is a peer that does not read: what we have for it must not pile up here.
_STALLED_AFTER_S = 20.0
_LEAST_BYTES_A_SECOND = 1 << 10


@dataclass(frozen=True)
class Nonces:
    """One fresh random number from each side, so that no recorded talk can be played again."""

    acceptor: str
    dialer: str

    def sign(self, token: str, purpose: str) -> bytes:
        text = f"shoal {PROTOCOL} {purpose} {self.acceptor} {self.dialer}"
        # A stranger's number may be any text, also one that UTF-8 cannot say.
        return hmac.new(token.encode(), text.encode(errors="surrogatepass"), hashlib.sha256).digest()


class Channel:
    """Messages in both directions, after the greeting. `send` may be called by several tasks at once."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send_key: bytes, receive_key: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._is_forged = False
        self._sending = asyncio.Lock()

    async def send(self, message: Message) -> None:
        payload = json.dumps(message, separators=(",", ":")).encode()
        async with self._sending:
            frame = _tag(self._send_key, self._sent, payload) + payload
            self._sent += 1
            self._writer.write(len(payload).to_bytes(_LENGTH, "big") + frame)
            await self._drain()

    async def _drain(self) -> None:
        """As long as it takes on a slow link, but not for ever. Raises `TimeoutError`, which is an `OSError`."""
        transport = self._writer.transport
        while True:
            before = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(_STALLED_AFTER_S):
                    return await self._writer.drain()
            except TimeoutError:
                if before - transport.get_write_buffer_size() < _STALLED_AFTER_S * _LEAST_BYTES_A_SECOND:
                    transport.abort()
                    raise

    async def receive(self) -> Message:
        """Raises `ControlError` for a forged message and `OSError` or `EOFError` when the other side is gone."""
        if self._is_forged:
            raise ControlError("an earlier message on this control channel was forged", why="nothing after it counts")
        size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
        if size > _MOST_BYTES:
            self._is_forged = True
            raise ControlError(f"a message of {size} bytes on the control channel", why="the stream is broken")
        tag = await self._reader.readexactly(_TAG)
        payload = await self._reader.readexactly(size)
        if not is_same(tag, _tag(self._receive_key, self._received, payload)):
            self._is_forged = True
            raise ControlError(
                "a message on the control channel does not carry the run's tag",
                why="somebody between the machines changed it, or wrote into the connection",
            )
        self._received += 1
        return _parse(payload)

    def is_closed(self) -> bool:
        """Whether the other side has gone, as far as that can be told without reading."""
        return self._reader.at_eof() or self._writer.is_closing()

    def own_address(self) -> str:
        """Ours, on the way to the other side."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def close(self) -> None:
        """What a peer that does not read has left in our buffer is given up: nothing waits for it."""
        self._writer.close()
        if self._writer.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_STALLED_AFTER_S, self._writer.transport.abort)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Channel:
    """The listening side's greeting."""
    _keep_alive(writer)
    async with asyncio.timeout(_GREETING_S):
        ours = secrets.token_hex(16)
        await _say(writer, {"shoal": PROTOCOL, "nonce": ours})
        answer = await _hear(reader)
        nonces = Nonces(ours, _nonce(answer))
        _check(answer, nonces, token, "dialer")
        await _say(writer, {"proof": nonces.sign(token, "acceptor").hex()})
    keys = nonces.sign(token, "acceptor to dialer"), nonces.sign(token, "dialer to acceptor")
    return Channel(reader, writer, *keys)


async def dial(address: str, port: int, token: str) -> Channel:
    """The calling side's greeting. The writer is closed again when it fails."""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_AGAIN_S)
        if (channel := await _dial_once(address, port, token)) is not None:
            return channel
    raise UnknownSender(
        f"{address}:{port} refused us: it does not know our token",
        why="what listens there belongs to another run, or ended at this moment",
    )


async def _dial_once(address: str, port: int, token: str) -> Channel | None:
    """None when the other side heard our proof and left: it refused us, or a crowd at its door pushed us out."""
    reader, writer = await asyncio.open_connection(address, port)
    _keep_alive(writer)
    try:
        async with asyncio.timeout(_GREETING_S):
            opening = await _hear(reader)
            if opening.get("shoal") != PROTOCOL:
                raise ControlError(
                    f"{address}:{port} speaks protocol {opening.get('shoal')}, we speak {PROTOCOL}",
                    why="the machines have different versions of shoal",
                    fix="bring all of them to the same one: shoal setup HOSTS",
                )
            nonces = Nonces(_nonce(opening), secrets.token_hex(16))
            await _say(writer, {"nonce": nonces.dialer, "proof": nonces.sign(token, "dialer").hex()})
            try:
                answer = await _hear(reader)
            except EOFError:
                writer.close()
                return None
            _check(answer, nonces, token, "acceptor")
    except BaseException:
        writer.close()
        raise
    keys = nonces.sign(token, "dialer to acceptor"), nonces.sign(token, "acceptor to dialer")
    return Channel(reader, writer, *keys)


def _nonce(message: Message) -> str:
    """Only what we ourselves would send: it becomes part of a text that is signed."""
    nonce = str(message.get("nonce", ""))
    if not _NONCE.fullmatch(nonce):
        raise UnknownSender("what answers on the control channel is not shoal", why="it did not send a random number")
    return nonce


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A pulled cable closes no connection: the kernel asks, and after some silence it is closed for us."""
    connection = writer.get_extra_info("socket")
    options = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    for name, value in options.items():
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            connection.setsockopt(level, getattr(socket, name), value)


def _check(answer: Message, nonces: Nonces, token: str, purpose: str) -> None:
    if not is_same(str(answer.get("proof", "")), nonces.sign(token, purpose).hex()):
        raise UnknownSender(
            "a stranger on the control channel: it does not know this run's token",
            why="it belongs to another run, or to nobody",
        )


def _tag(key: bytes, position: int, payload: bytes) -> bytes:
    return hmac.new(key, position.to_bytes(8, "big") + payload, hashlib.sha256).digest()[:_TAG]


async def _say(writer: asyncio.StreamWriter, message: Message) -> None:
    payload = json.dumps(message).encode()
    writer.write(len(payload).to_bytes(_LENGTH, "big") + payload)
    await writer.drain()


async def _hear(reader: asyncio.StreamReader) -> Message:
    size = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if size > _MOST_BYTES_FROM_STRANGERS:
        raise ControlError("what answers there is not shoal", why=f"it began with a message of {size} bytes")
    return _parse(await reader.readexactly(size))


def _parse(payload: bytes) -> Message:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ControlError("a message on the control channel that is no message", why="the other side is not shoal")
    return message

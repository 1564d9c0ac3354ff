"""An authenticated channel between two processes of one run, the run's token, and the framing of messages.

Both sides know the run's token and neither sends it: each proves it with an HMAC over the other's nonce. After that
every message carries a tag made with a key of its direction and its position in the stream, so an attacker in between
cannot add, change, drop or repeat a message unnoticed. The channel is not encrypted, like gloo's own traffic.

It carries membership, state and logs; no message makes the other side run anything, except among the pods of a
Kubernetes Job (`cluster.pods.server`).
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

from shoal.control.membership.settings import (
    DIAL_RETRY_S,
    HANDSHAKE_TIMEOUT_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    SEND_STALLED_AFTER_S,
)
from shoal.errors import ControlError, UnknownSender

PROTOCOL = 2
Message = dict[str, Any]

# The advice of every message about versions that differ.
SAME_VERSIONS = "bring all machines to the same versions: shoal setup HOSTS"

# Every frame begins with the length of its payload, as a big-endian number of this many bytes.
LENGTH = 4
MIN_BYTES_PER_S = 1 << 10
_MAX_BYTES = 8 << 20
# A peer that has not proved anything yet gets little of this process's memory.
_MAX_HANDSHAKE_BYTES = 1024
_TAG = 16
_NONCE = re.compile(r"[0-9a-f]{32}")
# A sealed token: a nonce of 16 bytes and the 32 bytes of the token.
_SEALED = re.compile(r"[0-9a-f]{96}")
# A member that the connection guard pushed out gets in at the second or third attempt.
_DIAL_ATTEMPTS = 3


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH, "big") + payload


async def read_frame(reader: asyncio.StreamReader, max_bytes: int, what: str) -> bytes:
    """Return the payload of the next frame; ControlError, which names `what` was read, if it is too long."""
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if size > max_bytes:
        raise ControlError(f"{what} has {size} bytes", why="the stream is broken")
    return await reader.readexactly(size)


def receive_frame(connection: socket.socket, max_bytes: int, what: str) -> bytes | None:
    """Do the same in a thread that blocks. None when the other end closed the connection."""
    head = _receive_exactly(connection, LENGTH)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > max_bytes:
        raise ControlError(f"{what} has {size} bytes", why="the stream is broken")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        try:
            part = connection.recv(size - len(received))
        except OSError:
            return None
        if not part:
            return None
        received += part
    return bytes(received)


def make_token(path: Path) -> str:
    """Write a fresh token, readable only by its owner from the first moment."""
    token = secrets.token_hex(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def is_equal_secret(sent: str | bytes, secret: str | bytes) -> bool:
    """Compare a received value with a secret in constant time.

    `hmac.compare_digest` raises TypeError for text that is not ASCII, and a received value may be any text.
    """
    return hmac.compare_digest(_as_bytes(sent), _as_bytes(secret))


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def seal(token: str, code: str) -> str:
    """Encrypt the token for a node that knows a one-time code."""
    nonce = secrets.token_bytes(16)
    return (nonce + _xor(bytes.fromhex(token), code, nonce)).hex()


def unseal(sealed: object, code: str) -> str:
    """Decrypt a token; ControlError for a value that `seal` would not have written."""
    if not isinstance(sealed, str) or not _SEALED.fullmatch(sealed):
        raise ControlError("the host sent no token", why="its shoal is another")
    raw = bytes.fromhex(sealed)
    return _xor(raw[16:], code, raw[:16]).hex()


def _xor(secret: bytes, code: str, nonce: bytes) -> bytes:
    """A one-time pad: the secret is as long as the digest, and a code is used once."""
    pad = hmac.new(code.encode(), b"shoal token " + nonce, hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(secret, pad, strict=True))


@dataclass(frozen=True)
class Nonces:
    """One fresh random number of each side, so that no recorded conversation can be replayed."""

    acceptor: str
    dialer: str

    def sign(self, token: str, purpose: str) -> bytes:
        text = f"shoal {PROTOCOL} {purpose} {self.acceptor} {self.dialer}"
        # A peer's nonce may be any text, also one that UTF-8 cannot encode.
        return hmac.new(token.encode(), text.encode(errors="surrogatepass"), hashlib.sha256).digest()


class Channel:
    """Messages in both directions, after the handshake. Several tasks may call `send` at once."""

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
            tag = _tag(self._send_key, self._sent, payload)
            self._sent += 1
            self._writer.write(len(payload).to_bytes(LENGTH, "big") + tag + payload)
            await self._drain()

    async def _drain(self) -> None:
        """Wait as long as a slow link needs, but not forever. TimeoutError, an OSError, if the peer does not read."""
        transport = self._writer.transport
        while True:
            before = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(SEND_STALLED_AFTER_S):
                    return await self._writer.drain()
            except TimeoutError:
                if before - transport.get_write_buffer_size() < SEND_STALLED_AFTER_S * MIN_BYTES_PER_S:
                    transport.abort()
                    raise

    async def receive(self) -> Message:
        """Return the next message; ControlError for a forged one, OSError or EOFError when the peer is gone."""
        if self._is_forged:
            raise ControlError("an earlier message on this control channel was forged", why="nothing after it counts")
        size = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
        if size > _MAX_BYTES:
            self._is_forged = True
            raise ControlError(f"a message of {size} bytes on the control channel", why="the stream is broken")
        tag = await self._reader.readexactly(_TAG)
        payload = await self._reader.readexactly(size)
        if not is_equal_secret(tag, _tag(self._receive_key, self._received, payload)):
            self._is_forged = True
            raise ControlError(
                "a message on the control channel does not carry the run's tag",
                why="it was changed between the machines, or another process wrote into the connection",
            )
        self._received += 1
        return _parse(payload)

    def is_closed(self) -> bool:
        """Return whether the peer has gone, as far as that is known without reading."""
        return self._reader.at_eof() or self._writer.is_closing()

    def own_address(self) -> str:
        """Return this end's address on this connection."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def close(self) -> None:
        """Close without waiting; drop what a peer that does not read has left in the send buffer."""
        self._writer.close()
        if self._writer.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(SEND_STALLED_AFTER_S, self._writer.transport.abort)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Channel:
    """Perform the listening side's handshake."""
    _keep_alive(writer)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        nonce = secrets.token_hex(16)
        await _send_plain(writer, {"shoal": PROTOCOL, "nonce": nonce})
        answer = await _receive_plain(reader)
        nonces = Nonces(nonce, _read_nonce(answer))
        _check_proof(answer, nonces, token, "dialer")
        await _send_plain(writer, {"proof": nonces.sign(token, "acceptor").hex()})
    keys = nonces.sign(token, "acceptor to dialer"), nonces.sign(token, "dialer to acceptor")
    return Channel(reader, writer, *keys)


async def dial(address: str, port: int, token: str) -> Channel:
    """Connect and perform the calling side's handshake. The connection is closed again when it fails."""
    for attempt in range(_DIAL_ATTEMPTS):
        if attempt:
            await asyncio.sleep(DIAL_RETRY_S)
        if (channel := await _dial_once(address, port, token)) is not None:
            return channel
    raise UnknownSender(
        f"{address}:{port} refused us: it does not know our token",
        why="what listens there belongs to another run, or ended at this moment",
    )


async def _dial_once(address: str, port: int, token: str) -> Channel | None:
    """Return None when the peer closed after this end's proof: it refused, or its connection guard made room."""
    reader, writer = await asyncio.open_connection(address, port)
    _keep_alive(writer)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            opening = await _receive_plain(reader)
            if opening.get("shoal") != PROTOCOL:
                raise ControlError(
                    f"{address}:{port} uses protocol {opening.get('shoal')}, we use {PROTOCOL}",
                    why="the machines have different versions of shoal",
                    fix=SAME_VERSIONS,
                )
            nonces = Nonces(_read_nonce(opening), secrets.token_hex(16))
            await _send_plain(writer, {"nonce": nonces.dialer, "proof": nonces.sign(token, "dialer").hex()})
            try:
                answer = await _receive_plain(reader)
            except EOFError:
                writer.close()
                return None
            _check_proof(answer, nonces, token, "acceptor")
    except BaseException:
        writer.close()
        raise
    keys = nonces.sign(token, "dialer to acceptor"), nonces.sign(token, "acceptor to dialer")
    return Channel(reader, writer, *keys)


def _read_nonce(message: Message) -> str:
    """Return the peer's nonce; only what this end would send, because it becomes part of a signed text."""
    nonce = str(message.get("nonce", ""))
    if not _NONCE.fullmatch(nonce):
        raise UnknownSender("what answers on the control channel is not shoal", why="it did not send a random number")
    return nonce


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel probe an idle connection and close it after some silence: a pulled cable closes nothing."""
    connection = writer.get_extra_info("socket")
    options = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": KEEPALIVE_IDLE_S}
    options |= {"TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S, "TCP_KEEPCNT": KEEPALIVE_PROBES}
    for name, value in options.items():
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            connection.setsockopt(level, getattr(socket, name), value)


def _check_proof(answer: Message, nonces: Nonces, token: str, purpose: str) -> None:
    if not is_equal_secret(str(answer.get("proof", "")), nonces.sign(token, purpose).hex()):
        raise UnknownSender(
            "an unknown process on the control channel: it does not know this run's token",
            why="it belongs to another run, or to none",
        )


def _tag(key: bytes, position: int, payload: bytes) -> bytes:
    return hmac.new(key, position.to_bytes(8, "big") + payload, hashlib.sha256).digest()[:_TAG]


async def _send_plain(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(frame(json.dumps(message).encode()))
    await writer.drain()


async def _receive_plain(reader: asyncio.StreamReader) -> Message:
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if size > _MAX_HANDSHAKE_BYTES:
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

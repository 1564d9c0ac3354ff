"""How the ranks of a machine come to have the same memory and a way to wait for each other.

The first rank listens on a socket in Linux's abstract namespace, which is no file and goes with its process; the others
connect and are handed the memory's descriptor. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.sync.shared.kin import Kin
from shoal.sync.shared.memory import Memory, create
from shoal.sync.shared.turnstile import FirstTurnstile, OpenTurnstile, OtherTurnstile, Turnstile

ADDRESS_BYTES = 16
# All of them have just met in an all-gather: who is not here in seconds never will be.
_MEET_WITHIN_S = 10.0
_HELLO = struct.Struct("!II")
_CREDENTIALS = struct.Struct("iII")
_READY = b"memory"


@dataclass(frozen=True)
class Together:
    """What the ranks of one machine share. `lanes` are independent turnstiles: what goes through one never waits for
    the other."""

    kin: Kin
    memory: Memory
    lanes: tuple[Turnstile, ...]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[bytes, socket.socket]]:
    """A place to be found, before anybody is told of it."""
    address = secrets.token_bytes(ADDRESS_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_name(address))
        listener.listen()
        yield address, listener


def meet(kin: Kin, listener: socket.socket, row_bytes: int, lane_s: tuple[float, ...]) -> Together:
    """`lane_s`: a turnstile for each, with this deadline. OSError when it cannot be; nothing is left open then."""
    rank = kin.ranks[kin.index]
    if kin.size == 1:
        fd = create(1, row_bytes)
        lanes: list[Turnstile] = [OpenTurnstile() for _ in lane_s]
    elif kin.is_first:
        fd = create(kin.size, row_bytes)
        peers = _welcome(kin, listener, len(lane_s), fd)
        lanes = [FirstTurnstile(rank, each, timeout_s) for each, timeout_s in zip(peers, lane_s, strict=True)]
    else:
        firsts, fd = _call(kin, len(lane_s))
        pairs = zip(firsts, lane_s, strict=True)
        lanes = [OtherTurnstile(rank, kin.ranks[0], first, timeout_s) for first, timeout_s in pairs]
    try:
        return Together(kin, Memory(fd, kin.size, row_bytes), tuple(lanes))
    finally:
        # The mapping holds the memory.
        os.close(fd)


def _welcome(kin: Kin, listener: socket.socket, lanes: int, fd: int) -> list[dict[int, socket.socket]]:
    deadline = time.monotonic() + _MEET_WITHIN_S
    found: list[dict[int, socket.socket]] = [{} for _ in range(lanes)]
    try:
        while sum(map(len, found)) < lanes * (kin.size - 1):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = listener.accept()
            if (hello := _hear(peer)) is None:
                peer.close()
                continue
            rank, lane = hello
            found[lane][rank] = peer
        for peer in found[0].values():
            socket.send_fds(peer, [_READY], [fd])
    except OSError:
        os.close(fd)
        for peer in (peer for each in found for peer in each.values()):
            peer.close()
        raise
    return found


def _hear(peer: socket.socket) -> tuple[int, int] | None:
    """Rank and lane, or nothing when it is somebody else's process."""
    peer.settimeout(_MEET_WITHIN_S)
    if not _is_ours(peer):
        return None
    said = peer.recv(_HELLO.size)
    peer.settimeout(None)
    return _HELLO.unpack(said) if len(said) == _HELLO.size else None


def _call(kin: Kin, lanes: int) -> tuple[list[socket.socket], int]:
    firsts: list[socket.socket] = []
    try:
        for lane in range(lanes):
            firsts.append(first := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            first.settimeout(_MEET_WITHIN_S)
            first.connect(_name(kin.address))
            if not _is_ours(first):
                raise PermissionError("another user's process listens where the first rank should")
            first.send(_HELLO.pack(kin.ranks[kin.index], lane))
        _, fds, _, _ = socket.recv_fds(firsts[0], len(_READY), 1)
        if not fds:
            raise ConnectionError("the first rank of this machine could not make the memory")
    except OSError:
        for first in firsts:
            first.close()
        raise
    return firsts, fds[0]


def _is_ours(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _name(address: bytes) -> bytes:
    return b"\0shoal-" + address.hex().encode()

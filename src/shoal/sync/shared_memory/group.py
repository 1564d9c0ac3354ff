"""The ranks of one host: find them, give them common memory and barriers, and choose how they exchange gradients.

HostGroup     which ranks run on this host
SharedRows    memory that all of them map: one row for each rank
HostBarrier   a barrier between their processes
HostSharing   all three together, as `open_host_sharing` makes them
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema import SyncConfig
from shoal.control.processes import RUN_MARK
from shoal.errors import PeerLost, RunFailed
from shoal.host.facts import boot_id
from shoal.host.memory import available_bytes
from shoal.sync.compression import make_compressor
from shoal.sync.compression.base import Compressor
from shoal.sync.interruptible import await_work
from shoal.sync.world import World, with_second_group
from shoal.units import format_si

Way = Literal["gloo", "copies", "shared"]


@dataclass(frozen=True)
class InsideChoice:
    """How the ranks of one host exchange gradients."""

    way: Way = "gloo"
    note: str = ""  # why it is not shared memory, where that might be expected


GLOO = InsideChoice()


def preferred_way(config: SyncConfig, world: World, model: nn.Module) -> InsideChoice:
    """Return what to try, before the hosts are examined. The same on every rank."""
    if config.inside == "gloo" or world.size == 1:
        return GLOO
    if world.gpu_group is not None:
        return _fall_back(config, "the ranks' GPUs exchange by NCCL")
    if sys.platform != "linux":
        return _fall_back(config, "only Linux has memory without a name that processes hand to each other")
    is_mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
    if config.inside == "copies" or config.measure == "barrier" or is_mixed or world.has_gpus:
        return InsideChoice("copies")
    return InsideChoice("shared")


def _fall_back(config: SyncConfig, reason: str) -> InsideChoice:
    """Use gloo and note the reason under `auto`; raise where shared memory was requested."""
    if config.inside == "auto":
        return InsideChoice("gloo", reason)
    raise RunFailed(
        f"sync.inside={config.inside} cannot be: {reason}",
        why="ranks of one machine exchange through memory that they share",
        fix="leave it to shoal: --inside auto",
    )


def open_host_sharing(
    config: SyncConfig, world: World, way: Way, row_bytes: Callable[[HostGroup], int]
) -> tuple[InsideChoice, HostSharing | None]:
    """Find the ranks of this host and open their memory, on all ranks of the world or on none."""
    with _listening() as (address, listener):
        group = find_host_group(world, address)
        if len(group.first_ranks) == world.size:
            # Under `auto` this needs no note: most clusters have one rank per host.
            return (GLOO if config.inside == "auto" else _fall_back(config, "no two ranks share a machine")), None
        if len(group.first_ranks) == 1 and config.wire != "fp32" and config.inside == "auto":
            return InsideChoice("gloo", f"nothing would travel as {config.wire} inside one machine"), None
        # The second barrier also waits for the exchange between hosts, which has a timeout of its own.
        timeouts_s = (config.timeout_s,) if len(group.first_ranks) == 1 else (config.timeout_s, 2 * config.timeout_s)
        sharing, problem = None, ""
        try:
            sharing = _share(group, listener, row_bytes(group), timeouts_s)
        except OSError as error:
            problem = f"no shared memory on {world.node}: {error}"
    is_open_everywhere = torch.tensor(int(sharing is not None))
    await_work(dist.all_reduce(is_open_everywhere, dist.ReduceOp.MIN, group=world.group, async_op=True), world.release)
    if is_open_everywhere:
        return InsideChoice(way), sharing
    if sharing is not None:
        sharing.close()
    return _fall_back(config, problem or "another rank of this run has no shared memory"), None


def make_inter_host_compressor(
    config: SyncConfig, world: World, group: HostGroup, model: nn.Module
) -> Compressor | None:
    """Return what the first rank of every host sends the host's sums by; None on other ranks, and for one host.

    All ranks of the world must call it, as for any new group.
    """
    if len(group.first_ranks) == 1:
        return None
    first_ranks = with_second_group(world, config.timeout_s, group.first_ranks)
    if not group.is_first:
        return None
    # It gets sums in shared memory, whatever device the ranks compute on.
    on_processor = replace(first_ranks, device=torch.device("cpu"))
    return make_compressor(config.wire, on_processor, dict(model.named_parameters()))


# Which ranks run on this host.

_DIGEST_BYTES = 32
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class HostGroup:
    ranks: tuple[int, ...]  # the ranks of this host, in the order of the world
    index: int  # this rank's place among them
    first_ranks: tuple[int, ...]  # the first rank of every host
    address: bytes  # where the first rank of this host listens

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0


def find_host_group(world: World, address: bytes) -> HostGroup:
    """Exchange host identities and listening addresses in one small all-gather."""
    own = torch.frombuffer(bytearray(_host_identity(world.node) + address), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world.size)]
    await_work(dist.all_gather(rows, own, group=world.group, async_op=True), world.release)
    received = [bytes(row.tolist()) for row in rows]
    groups = group_by_machine([row[:_DIGEST_BYTES] for row in received])
    ranks = next(group for group in groups if world.rank in group)
    first_ranks = tuple(group[0] for group in groups)
    return HostGroup(ranks, ranks.index(world.rank), first_ranks, received[ranks[0]][_DIGEST_BYTES:])


def group_by_machine(machines: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Group ranks by the identity of their host, in the order of their first ranks."""
    groups: dict[bytes, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _host_identity(node: str) -> bytes:
    """Return a digest that ranks share if they can share memory; a random one where the host cannot be identified.

    The node's name is not enough: under torchrun it is the same on every machine. Nor is the kernel's boot id: the
    nodes of an emulated lab have it in common, and must use their links.
    """
    kernel = boot_id()
    try:
        namespace = str(_NETWORK_NAMESPACE.readlink())
    except OSError:
        namespace = ""
    if not kernel or not namespace:
        return secrets.token_bytes(_DIGEST_BYTES)
    facts = (node, kernel, namespace, str(os.getuid()))
    return hashlib.sha256("\n".join(facts).encode()).digest()


# Shared rows. A memfd has no name in /dev/shm, so Docker's limit of 64 MB there does not apply, and the kernel frees it
# with the last process that maps it, however that one ended.


class SharedRows:
    """Memory that several processes map: rows of `row_bytes`, rounded up to whole pages.

    Every rank has its own pages: the kernel places them near the processor that writes them first.
    """

    def __init__(self, fd: int, rows: int, row_bytes: int) -> None:
        self._map = mmap.mmap(fd, rows * _whole_pages(row_bytes))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).view(rows, -1)

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._bytes.view(dtype).unbind(0)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create_memory(rows: int, row_bytes: int) -> int:
    """Return a file descriptor that `SharedRows` can map. Raise OSError where the kernel or a limit forbids it."""
    size = rows * _whole_pages(row_bytes)
    if (available := available_bytes()) < size:
        raise OSError(f"{format_si(size, 'B')} of memory are wanted and {format_si(available, 'B')} are free")
    fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


# A barrier between processes of one host that sleeps, has a timeout, and notices at once that a peer is gone. Every
# rank has a socket to the first one: it sends a byte on arrival and continues when it gets one back. The kernel closes
# the socket of a killed process, so no rank waits for it; a stopped process is given up after `timeout_s`. Sockets also
# order memory: what a rank wrote before it sent its byte is visible to a rank that received the answer. A counter in
# shared memory would not guarantee that from Python, and spinning on it takes the core that a peer computes on.

_ARRIVED, _CONTINUE, _LOST, _TIMED_OUT = b"h", b"g", b"l", b"s"
# Other ranks wait this much longer than the first rank, because only the first knows which rank is missing.
_GRACE_S = 2.0
_MAX_MESSAGE_BYTES = 16


class HostBarrier(Protocol):
    def arrive(self) -> None:
        """Wait for all ranks of the host; raise PeerLost when one of them never arrives."""

    def close(self) -> None:
        """Close the connections: waiting peers learn at once that this rank does not arrive."""


class FirstRankBarrier:
    def __init__(self, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self._peers = peers  # a connection to each other rank
        self._rank_of = {peer.fileno(): number for number, peer in peers.items()}
        self._timeout_s = timeout_s
        self._poll = select.poll()
        for peer in peers.values():
            self._poll.register(peer, select.POLLIN)

    def arrive(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(self._peers)
        while missing:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not ready:
                self._fail(_TIMED_OUT, min(missing))
            for fd, _ in ready:
                rank = self._rank_of[fd]
                message = b""
                with contextlib.suppress(OSError):
                    message = self._peers[rank].recv(_MAX_MESSAGE_BYTES)
                if not message:
                    # A closed connection is ready to be read, too.
                    self._fail(_LOST, rank)
                missing.discard(rank)
        for rank, peer in self._peers.items():
            try:
                peer.send(_CONTINUE)
            except OSError:
                self._fail(_LOST, rank)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _fail(self, reason: bytes, lost: int) -> NoReturn:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(reason + str(lost).encode(), socket.MSG_DONTWAIT)
        self.close()
        raise _peer_lost(reason, lost, self._timeout_s)


class OtherRankBarrier:
    def __init__(self, first_rank: int, first: socket.socket, timeout_s: float) -> None:
        self._first_rank = first_rank
        self._first = first
        self._timeout_s = timeout_s
        first.settimeout(timeout_s + _GRACE_S)

    def arrive(self) -> None:
        try:
            self._first.send(_ARRIVED)
            reply = self._first.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError:
            reply = _TIMED_OUT
        except OSError:
            reply = _LOST
        if reply != _CONTINUE:
            self.close()
            lost = int(reply[1:]) if reply[1:] else self._first_rank
            raise _peer_lost(reply[:1], lost, self._timeout_s)

    def close(self) -> None:
        self._first.close()


class LoneRankBarrier:
    """For the only rank of a host."""

    def arrive(self) -> None:
        pass

    def close(self) -> None:
        pass


def _peer_lost(reason: bytes, lost: int, timeout_s: float) -> PeerLost:
    is_timeout = reason == _TIMED_OUT
    seen = f"Timed out waiting {timeout_s:g} s for" if is_timeout else "Connection closed by peer,"
    return PeerLost(
        f"{seen} rank {lost} on the same machine",
        why="it is stopped or hangs" if is_timeout else "it was killed or failed",
        # Only shoal's launcher keeps the output of the ranks in the run folder.
        fix=f"look at what rank {lost} printed last{': shoal logs RUN' if RUN_MARK in os.environ else ''}",
    )


# How the ranks of a host get the same memory. The first rank listens on a socket in Linux's abstract namespace, which
# is not a file and ends with its process. The others connect and receive the memory's file descriptor. Only processes
# of the same user are accepted.

_ADDRESS_BYTES = 16
# The ranks have just met in an all-gather: a rank that does not connect within seconds never will.
_CONNECT_TIMEOUT_S = 10.0
_HELLO = struct.Struct("!II")  # rank, number of the barrier
_CREDENTIALS = struct.Struct("iII")
_MEMORY_FOLLOWS = b"memory"


@dataclass(frozen=True)
class HostSharing:
    """What the ranks of one host share."""

    group: HostGroup
    memory: SharedRows
    barriers: tuple[HostBarrier, ...]  # independent: no thread of one waits for the other

    def close(self) -> None:
        for barrier in self.barriers:
            barrier.close()


@contextlib.contextmanager
def _listening() -> Iterator[tuple[bytes, socket.socket]]:
    address = secrets.token_bytes(_ADDRESS_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_socket_name(address))
        listener.listen()
        yield address, listener


def _share(group: HostGroup, listener: socket.socket, row_bytes: int, timeouts_s: tuple[float, ...]) -> HostSharing:
    """Open the memory, and a barrier with each timeout. On failure raise OSError and leave nothing open."""
    barriers: list[HostBarrier]
    if group.size == 1:
        fd = create_memory(1, row_bytes)
        barriers = [LoneRankBarrier() for _ in timeouts_s]
    elif group.is_first:
        fd = create_memory(group.size, row_bytes)
        peers = _accept_peers(group, listener, len(timeouts_s), fd)
        barriers = [FirstRankBarrier(*pair) for pair in zip(peers, timeouts_s, strict=True)]
    else:
        connections, fd = _connect_to_first(group, len(timeouts_s))
        pairs = zip(connections, timeouts_s, strict=True)
        barriers = [OtherRankBarrier(group.ranks[0], first, timeout_s) for first, timeout_s in pairs]
    try:
        return HostSharing(group, SharedRows(fd, group.size, row_bytes), tuple(barriers))
    finally:
        # The mapping keeps the memory.
        os.close(fd)


def _accept_peers(group: HostGroup, listener: socket.socket, barriers: int, fd: int) -> list[dict[int, socket.socket]]:
    """Return, for each barrier, a connection to every other rank of the host; pass them the memory."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    peers: list[dict[int, socket.socket]] = [{} for _ in range(barriers)]
    try:
        while sum(map(len, peers)) < barriers * (group.size - 1):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = listener.accept()
            if (hello := _receive_hello(peer)) is None:
                peer.close()
                continue
            rank, barrier = hello
            peers[barrier][rank] = peer
        for peer in peers[0].values():
            socket.send_fds(peer, [_MEMORY_FOLLOWS], [fd])
    except OSError:
        os.close(fd)
        for connections in peers:
            for peer in connections.values():
                peer.close()
        raise
    return peers


def _receive_hello(peer: socket.socket) -> tuple[int, int] | None:
    """Return rank and barrier; None for another user's process."""
    peer.settimeout(_CONNECT_TIMEOUT_S)
    if not _is_same_user(peer):
        return None
    hello = peer.recv(_HELLO.size)
    peer.settimeout(None)
    return _HELLO.unpack(hello) if len(hello) == _HELLO.size else None


def _connect_to_first(group: HostGroup, barriers: int) -> tuple[list[socket.socket], int]:
    """Return a connection to the first rank for each barrier, and the memory's file descriptor."""
    connections: list[socket.socket] = []
    try:
        for barrier in range(barriers):
            connections.append(first := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            first.settimeout(_CONNECT_TIMEOUT_S)
            first.connect(_socket_name(group.address))
            if not _is_same_user(first):
                raise PermissionError("another user's process listens where the first rank should")
            first.send(_HELLO.pack(group.ranks[group.index], barrier))
        _, fds, _, _ = socket.recv_fds(connections[0], len(_MEMORY_FOLLOWS), 1)
        if not fds:
            raise ConnectionError("the first rank of this machine could not make the memory")
    except OSError:
        for connection in connections:
            connection.close()
        raise
    return connections, fds[0]


def _is_same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _socket_name(address: bytes) -> bytes:
    return b"\0shoal-" + address.hex().encode()

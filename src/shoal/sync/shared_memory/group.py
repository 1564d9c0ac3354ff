"""Kin: the ranks of a world that run on the same machine, and can therefore share memory."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema import SyncConfig
from shoal.errors import PeerLost, RunFailed
from shoal.sync.compression import make_wire
from shoal.sync.compression.base import Compressor
from shoal.sync.interruptible import await_work
from shoal.sync.world import World, beside

_DIGEST_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class HostGroup:
    """`ranks` share our machine, in the order of the world; `firsts` are the first of every machine's.

    `address` is where the first of ours listens."""

    ranks: tuple[int, ...]
    index: int
    firsts: tuple[int, ...]
    address: bytes

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0


def find_kin(world: World, address: bytes) -> HostGroup:
    """Everybody says on which machine it is, and where it would listen: one small all-gather."""
    mine = torch.frombuffer(bytearray(_machine(world.node) + address), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(rows, mine, group=world.group, async_op=True), world.release)
    said = [bytes(row.tolist()) for row in rows]
    groups = group_by_machine([each[:_DIGEST_BYTES] for each in said])
    ours = next(group for group in groups if world.rank in group)
    return HostGroup(ours, ours.index(world.rank), tuple(group[0] for group in groups), said[ours[0]][_DIGEST_BYTES:])


def group_by_machine(machines: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Ranks with the same machine, by what each rank said; groups in the order of their first ranks."""
    found: dict[bytes, list[int]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault(machine, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _machine(node: str) -> bytes:
    """The node's name alone would not do: under torchrun it is the same on every machine. Nor would the kernel's
    boot: an emulated lab's nodes have that in common, and are to talk over their links. A machine that does not say
    what it is has nothing in common with any."""
    try:
        facts = (node, _BOOT_ID.read_text().strip(), str(_NETWORK.readlink()), str(os.getuid()))
    except OSError:
        return secrets.token_bytes(_DIGEST_BYTES)
    return hashlib.sha256("\n".join(facts).encode()).digest()


# SECTION sync/shared/memory
# Memory that several processes map: a row for each, without a name in any file system.
#
# A memfd has no place in /dev/shm, so Docker's 64 MB there do not limit it, and the kernel frees it with the last
# process that maps it, however that one ended.


# A row of its own pages for every rank: the kernel then puts them near whoever writes them first.
_PAGE = mmap.PAGESIZE


class SharedRows:
    """`rows` of `row_bytes` each, rounded up to whole pages."""

    def __init__(self, fd: int, rows: int, row_bytes: int) -> None:
        self._map = mmap.mmap(fd, rows * whole_pages(row_bytes))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).view(rows, -1)

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._bytes.view(dtype).unbind(0)


def whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def create(rows: int, row_bytes: int) -> int:
    """A descriptor of memory that `SharedRows` can map; OSError where the kernel or a limit forbids it."""
    size = rows * whole_pages(row_bytes)
    if (available := psutil.virtual_memory().available) < size:
        raise OSError(f"{size >> 20} MB of memory are wanted and {available >> 20} MB are free")
    fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


# SECTION sync/shared/host_barrier
# A barrier between processes of one machine that sleeps, has a deadline, and notices at once that a peer is gone.
#
# Every rank has a socket to the first one: it sends a word when it has come and goes on when it gets one back. The
#
# kernel closes the socket of a killed process, so nobody waits for it; a stopped one is given up after `timeout_s`.
# Sockets also order memory: what a rank wrote before it sent its word is seen by whoever got the answer. A counter in
# shared memory would not promise that from Python, and spinning on one takes the core that a peer computes on.


_HERE, _GO, _LOST, _SILENT = b"h", b"g", b"l", b"s"
# Who waits for the first rank lets it give up first: only that one knows who is missing.
_GRACE_S = 2.0
_MOST_BYTES = 16


class HostBarrier(Protocol):
    def arrive(self) -> None:
        """Returns when everybody has come; raises PeerLost when somebody never will."""
        ...

    def close(self) -> None:
        """Whoever waits for us learns at once that we do not come."""
        ...


class FirstRankBarrier:
    """`peers`: a connection to each of the others, by rank."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._peers = peers
        self._rank_of = {peer.fileno(): number for number, peer in peers.items()}
        self._timeout_s = timeout_s
        self._poll = select.poll()
        for peer in peers.values():
            self._poll.register(peer, select.POLLIN)

    def arrive(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(self._peers)
        while missing:
            came = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not came:
                self._give_up(_SILENT, min(missing))
            for fd, _ in came:
                self._hear(self._rank_of[fd])
                missing.discard(self._rank_of[fd])
        for rank in self._peers:
            self._let_through(rank)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _hear(self, rank: int) -> None:
        """A closed connection can be read, too: it has nothing to say."""
        said = b""
        with contextlib.suppress(OSError):
            said = self._peers[rank].recv(_MOST_BYTES)
        if not said:
            self._give_up(_LOST, rank)

    def _let_through(self, rank: int) -> None:
        try:
            self._peers[rank].send(_GO)
        except OSError:
            self._give_up(_LOST, rank)

    def _give_up(self, how: bytes, lost: int) -> NoReturn:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(how + str(lost).encode(), socket.MSG_DONTWAIT)
        self.close()
        raise _lost(self._rank, how, lost, self._timeout_s)


class OtherRankBarrier:
    def __init__(self, rank: int, first_rank: int, first: socket.socket, timeout_s: float) -> None:
        self._rank = rank
        self._first_rank = first_rank
        self._first = first
        self._timeout_s = timeout_s
        first.settimeout(timeout_s + _GRACE_S)

    def arrive(self) -> None:
        try:
            self._first.send(_HERE)
            said = self._first.recv(_MOST_BYTES)
        except TimeoutError:
            said = _SILENT
        except OSError:
            said = _LOST
        if said != _GO:
            self.close()
            lost = int(said[1:]) if said[1:] else self._first_rank
            raise _lost(self._rank, said[:1], lost, self._timeout_s)

    def close(self) -> None:
        self._first.close()


class LoneRankBarrier:
    """For a rank that is alone on its machine."""

    def arrive(self) -> None:
        pass

    def close(self) -> None:
        pass


def _lost(rank: int, how: bytes, lost: int, timeout_s: float) -> PeerLost:
    """In gloo's own words, by which a worker tells a consequence from a cause where torch hands on the text alone."""
    seen = f"Timed out waiting {timeout_s:g} s for" if how == _SILENT else "Connection closed by peer,"
    return PeerLost(
        f"rank {rank} lost a peer: {seen} rank {lost} on the same machine",
        why="it is stopped or hangs" if how == _SILENT else "it was killed or failed",
        fix=f"look at its log, rank-{lost}.log in the run folder",
    )


# SECTION sync/shared/meet
# How the ranks of a machine come to have the same memory and a way to wait for each other.
#
# The first rank listens on a socket in Linux's abstract namespace, which is no file and goes with its process; the
# others connect and are handed the memory's descriptor. Only processes of the same user are let in.


ADDRESS_BYTES = 16
# All of them have just met in an all-gather: who is not here in seconds never will be.
_MEET_WITHIN_S = 10.0
_HELLO = struct.Struct("!II")
_CREDENTIALS = struct.Struct("iII")
_READY = b"memory"


@dataclass(frozen=True)
class HostSharing:
    """What the ranks of one machine share. `lanes` are independent host_barriers: what goes through one never waits for
    the other."""

    kin: HostGroup
    memory: SharedRows
    lanes: tuple[HostBarrier, ...]

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


def meet(kin: HostGroup, listener: socket.socket, row_bytes: int, lane_s: tuple[float, ...]) -> HostSharing:
    """`lane_s`: a host_barrier for each, with this deadline. OSError when it cannot be; nothing is left open then."""
    rank = kin.ranks[kin.index]
    if kin.size == 1:
        fd = create(1, row_bytes)
        lanes: list[HostBarrier] = [LoneRankBarrier() for _ in lane_s]
    elif kin.is_first:
        fd = create(kin.size, row_bytes)
        peers = _welcome(kin, listener, len(lane_s), fd)
        lanes = [FirstRankBarrier(rank, each, timeout_s) for each, timeout_s in zip(peers, lane_s, strict=True)]
    else:
        firsts, fd = _call(kin, len(lane_s))
        pairs = zip(firsts, lane_s, strict=True)
        lanes = [OtherRankBarrier(rank, kin.ranks[0], first, timeout_s) for first, timeout_s in pairs]
    try:
        return HostSharing(kin, SharedRows(fd, kin.size, row_bytes), tuple(lanes))
    finally:
        # The mapping holds the memory.
        os.close(fd)


def _welcome(kin: HostGroup, listener: socket.socket, lanes: int, fd: int) -> list[dict[int, socket.socket]]:
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


def _call(kin: HostGroup, lanes: int) -> tuple[list[socket.socket], int]:
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


# SECTION sync/shared/choose
# Which way the ranks of one machine exchange gradients, and how they all come to the same one.


Way = Literal["gloo", "copies", "shared"]


@dataclass(frozen=True)
class InsideChoice:
    """`note` says why it is not shared memory where somebody might expect that."""

    way: Way = "gloo"
    note: str = ""


GLOO = InsideChoice()


def wanted(config: SyncConfig, world: World, model: nn.Module) -> InsideChoice:
    """What to try, before anybody has looked at the machines. The same on every rank."""
    if config.inside == "gloo" or world.size == 1:
        return GLOO
    if world.backend != "gloo" or world.device.type != "cpu":
        return _refuse(config, f"the ranks compute on {world.device.type} and exchange by {world.backend}")
    if sys.platform != "linux":
        return _refuse(config, "only Linux has memory without a name that processes hand to each other")
    is_mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
    if config.inside == "copies" or config.measure == "barrier" or is_mixed:
        return InsideChoice("copies")
    return InsideChoice("shared")


def come_together(
    config: SyncConfig, world: World, way: Way, row_bytes: Callable[[HostGroup], int]
) -> tuple[InsideChoice, HostSharing | None]:
    """Finds out who shares our machine and opens the memory, on all ranks of the world or on none."""
    with listening() as (address, listener):
        kin = find_kin(world, address)
        if len(kin.firsts) == world.size:
            # Nothing to remark where nobody asked for it: one rank a machine is what most clusters are.
            return (GLOO if config.inside == "auto" else _refuse(config, "no two ranks share a machine")), None
        if len(kin.firsts) == 1 and config.wire != "fp32" and config.inside == "auto":
            return InsideChoice("gloo", f"nothing would travel as {config.wire} inside one machine"), None
        # The second lane waits for the wire between machines, too, which has a deadline of its own.
        lane_s = (config.timeout_s,) if len(kin.firsts) == 1 else (config.timeout_s, 2 * config.timeout_s)
        together, trouble = None, ""
        try:
            together = meet(kin, listener, row_bytes(kin), lane_s)
        except OSError as error:
            trouble = f"no shared memory on {world.node}: {error}"
    if _everybody(world, together is not None):
        return InsideChoice(way), together
    if together is not None:
        together.close()
    return _refuse(config, trouble or "another rank of this run has no shared memory"), None


def between_machines(config: SyncConfig, world: World, kin: HostGroup, model: nn.Module) -> Compressor | None:
    """What the first rank of every machine sends that machine's sums by; None on all others, and for one machine.

    All ranks of the world must call it, as they must for any new group.
    """
    if len(kin.firsts) == 1:
        return None
    firsts = beside(world, config.timeout_s, kin.firsts)
    if not kin.is_first:
        return None
    return make_wire(config.wire, firsts, dict(model.named_parameters()))


def _everybody(world: World, is_there: bool) -> bool:
    flag = torch.tensor(int(is_there))
    await_work(dist.all_reduce(flag, dist.ReduceOp.MIN, group=world.group, async_op=True), world.release)
    return bool(flag)


def _refuse(config: SyncConfig, reason: str) -> InsideChoice:
    """A wish is a wish; `auto` goes on with gloo and says why."""
    if config.inside == "auto":
        return InsideChoice("gloo", reason)
    raise RunFailed(
        f"sync.inside={config.inside} cannot be: {reason}",
        why="ranks of one machine exchange through memory that they share",
        fix="leave it to shoal: --inside auto",
    )

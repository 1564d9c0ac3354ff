"""Which ranks never came to the meeting, told from outside: by their TCP sockets, without a word from the script.

With torch's own store, every rank keeps a connection to MASTER_PORT open for as long as its process group lives; where
rank 0 serves it, it listens there. A rank that has neither is alone, or meets the others elsewhere (a file, MPI, an
address written in the script), which sockets cannot tell: so this is a warning, never an error. Nor do they show the
opposite case, a rank that joins the group and then trains without it.

Look every second or so and remember (`JoinWatch`): a group that was destroyed after the training leaves no socket. A
rank that is refused, because rank 0 does not listen, has none either.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

from shoal.control.orders import StartProcess
from shoal.errors import RunFailed

Address = IPv4Address | IPv6Address

ALONE_AFTER_S = 60.0
_EVERY_S = 5.0
_PROC = Path("/proc")
_LISTEN = 0x0A  # the kernel's number for the state


@dataclass(frozen=True)
class Socket:
    """One TCP socket; `peer_port` is 0 while it listens."""

    listens: bool
    port: int
    peer: Address
    peer_port: int


def read_table(text: str) -> dict[int, Socket]:
    """The sockets of a /proc/PID/net/tcp or tcp6, by inode; those that no process holds any more have none."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {int(row[9]): _socket(row) for row in rows if len(row) > 9 and row[9] != "0"}


def _socket(row: list[str]) -> Socket:
    _, port = _end(row[1])
    peer, peer_port = _end(row[2])
    return Socket(int(row[3], 16) == _LISTEN, port, peer, peer_port)


def _end(text: str) -> tuple[Address, int]:
    digits, port = text.split(":")
    # Each group of four bytes is printed as one number, as this machine reads it.
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)), int(port, 16)


def _plain(address: str) -> Address:
    """torch opens IPv6 sockets for IPv4 too, where the peer is then ::ffff:10.77.0.1."""
    found = ip_address(address)
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def is_at(sockets: Iterable[Socket], address: str, port: int) -> bool:
    """Whether a rank with these sockets serves the meeting, or holds a connection to it or asks for one."""
    place = (_plain(address), port)
    return any((each.listens and each.port == port) or (each.peer, each.peer_port) == place for each in sockets)


def who_is_alone(met: Mapping[int, bool | None], world_size: int) -> list[int]:
    """The ranks that were never seen at the meeting. None stands for one that could not be looked at."""
    if world_size == 1:
        return []
    return sorted(rank for rank, seen in met.items() if seen is False)


def lonely(alone: list[int], address: str, port: int, after_s: float) -> RunFailed:
    """What to say where no rank was seen: to be shown as a warning, not raised, for the script may know better."""
    who = f"rank {alone[0]} has" if len(alone) == 1 else f"ranks {', '.join(map(str, alone))} have"
    return RunFailed(
        f"{who} not met the others at {address}:{port} in {after_s:.0f} s",
        why="a script that makes no process group trains once on every rank; one that meets elsewhere is fine",
        fix="call torch.distributed.init_process_group(), or tell Lightning its strategy, devices and num_nodes",
    )


def awaited(met: list[int], missing: list[int], address: str, port: int, after_s: float, run: str) -> RunFailed:
    """The same where some ranks are there: they wait for the others."""
    those, others = (f"rank {', '.join(map(str, sorted(ranks)))}" for ranks in (met, missing))
    waits = "waits" if len(met) == 1 else "wait"
    return RunFailed(
        f"{those} {waits} for {others}, not seen at {address}:{port} in {after_s:.0f} s",
        why=f"{others} hangs or is busy before init_process_group, or makes no process group",
        fix=f"see what it prints: shoal logs {run} --rank {min(missing)}; and what it does: py-spy dump --pid PID",
    )


def never_met(ranks: int) -> str:
    """For a script that ended well without a single key in the store of its ranks."""
    return (
        f"no rank joined a process group: each of the {ranks} ranks ran the whole script alone, unless they met "
        "elsewhere (call torch.distributed.init_process_group(), or tell Lightning its strategy, devices and num_nodes)"
    )


def left_behind(ended: list[int], running: list[int], after_s: float, run: str) -> str:
    """For ranks that still run long after others have ended well."""
    those, others = (f"rank {', '.join(map(str, sorted(ranks)))}" for ranks in (ended, running))
    return (
        f"{those} ended {after_s:.0f} s ago with exit code 0, and {others} still runs: if it waits for an exchange "
        f"with {those}, that never comes, and torch gives up after its timeout (gloo: 30 minutes, "
        f"NCCL: 10). To end it now: shoal stop {run}"
    )


@dataclass
class JoinWatch:
    """Looks now and then, and remembers who was ever there."""

    address: str
    port: int
    met: dict[int, bool | None] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> None:
        """At the ranks that run now. One that has ended may have come and gone between two looks: it is forgotten."""
        self.met = {rank: self.met.get(rank) or self._is_there(pid) for rank, pid in pids.items()}

    def _is_there(self, pid: int) -> bool | None:
        sockets = observe(pid)
        return None if sockets is None else is_at(sockets, self.address, self.port)


class UnjoinedRanks:
    """Reports once, a minute after the start, which of a node's ranks have come to the meeting, and which have not.
    Shoal's own ranks are not asked."""

    def __init__(self, starts: Iterable[StartProcess], report: Callable[[list[int], list[int], float], None]) -> None:
        asked = [start for start in starts if start.is_script_rank]
        self._ranks = {start.name: start.ranks[0] for start in asked}
        self._report = report
        self._call: JoinWatch | None = None
        self._looked_s = 0.0
        if asked and (world_size := int(asked[0].env["WORLD_SIZE"])) > 1:
            self._world_size = world_size
            self._call = JoinWatch(asked[0].env["MASTER_ADDR"], int(asked[0].env["MASTER_PORT"]))

    def look(self, pids: Mapping[str, int], elapsed_s: float) -> None:
        """`elapsed_s` is since the start. A look costs some milliseconds a rank, so there are few."""
        if self._call is None or elapsed_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = elapsed_s
        self._call.look({self._ranks[name]: pid for name, pid in pids.items() if name in self._ranks})
        if elapsed_s > ALONE_AFTER_S:
            met = sorted(rank for rank, seen in self._call.met.items() if seen)
            self._report(met, who_is_alone(self._call.met, self._world_size), elapsed_s)
            self._call = None


def observe(pid: int) -> list[Socket] | None:
    """The TCP sockets of a process and its descendants; None when it is gone, or not ours to look at.

    Each is looked up in the tables of its own network, for it may run on an emulated node. psutil's `net_connections`
    reads ours.
    """
    try:
        inodes = _inodes(pid)
    except OSError:
        return None
    found = _sockets(pid, inodes)
    for child in _descendants(pid):
        with contextlib.suppress(OSError):
            found += _sockets(child, _inodes(child))
    return found


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _sockets(pid: int, inodes: set[int]) -> list[Socket]:
    return [found for table in _tables(pid) for inode, found in read_table(table).items() if inode in inodes]


def _tables(pid: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6 has only the first
            yield (_PROC / str(pid) / "net" / name).read_text(encoding="ascii")


def _inodes(pid: int) -> set[int]:
    links = set()
    for entry in (_PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            links.add(str(entry.readlink()))
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}

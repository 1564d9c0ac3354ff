"""Sockets that a process listens on, read from the kernel, also in another network namespace."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class Listening:
    pid: int
    kind: str
    address: str
    port: int

    @property
    def is_everywhere(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified


def listening(pid: int) -> list[Listening]:
    """Return TCP ports that wait for connections and UDP ports that accept packets from any sender."""
    own = _inodes(pid)
    sockets = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            waits = state == _LISTEN if kind.startswith("tcp") else remote.endswith(":0000")
            if waits and rest[5] in own:
                address, port = local.split(":")
                sockets.append(Listening(pid, kind, _address(address), int(port, 16)))
    return sockets


def local_sockets(pids: Iterable[int]) -> set[str]:
    """Return the names of the named Unix sockets that these processes have open."""
    own = {inode for pid in pids for inode in _inodes(pid)}
    return {name for inode, name in _local_sockets() if inode in own}


def living(names: Set[str]) -> set[str]:
    """Return those of the names that a process still has open."""
    return {name for _, name in _local_sockets() if name in names}


def _local_sockets() -> list[tuple[str, str]]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [(words[6], words[7]) for words in lines if len(words) == 8]


def shared_files(pid: int) -> set[str]:
    """Return the files in /dev/shm that the process has mapped or open."""
    mapped = Path(f"/proc/{pid}/maps").read_text().split("\n")
    names = {line[line.index("/dev/shm/") :] for line in mapped if "/dev/shm/" in line}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(str(path.readlink()))
    return {name for name in names if name.startswith("/dev/shm/")}


def _inodes(pid: int) -> set[str]:
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> str:
    """Parse an address; the kernel prints its words in this machine's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))

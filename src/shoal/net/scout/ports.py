"""Who listens at a port of this machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Any, Literal

from shoal.net.scout.proc import PROC, pids, user_name
from shoal.net.scout.reading import read

_LISTENING = "0A"
_ORDER: Literal["little", "big"] = sys.byteorder


def listeners(port: int) -> list[dict[str, Any]]:
    """On whichever address, since torch's store takes all of them. `pid` is None when it is not ours to see."""
    entries = list(_listening(port))
    owners = _owners({inode for _, _, inode in entries})
    return [{"address": address, "user": user_name(uid), "pid": owners.get(inode)} for address, uid, inode in entries]


def _listening(port: int) -> Iterator[tuple[str, int, str]]:
    """Address, user and inode of each socket that listens there."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read(PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            place, _, number = fields[1].partition(":")
            if fields[3] == _LISTENING and int(number, 16) == port:
                yield _address(place, family), int(fields[7]), fields[9]


def _address(digits: str, family: int) -> str:
    """The kernel prints four bytes at a time, as a number in the machine's own order."""
    words = (int(digits[start : start + 8], 16) for start in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(word.to_bytes(4, _ORDER) for word in words))


def _owners(inodes: set[str]) -> dict[str, int]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, int] = {}
    for pid in pids() if wanted else ():
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = wanted.get(str(link.readlink()))
                    found |= {inode: pid} if inode else {}
    return found

"""Frees a rank that is stuck in an exchange, by shutting down the connections it exchanges over.

gloo's own `abort` and `shutdown` free nobody; a socket that is shut down does, in milliseconds, whoever waits on it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Connections:
    """Those that this process has made since this object was: what was open before is somebody else's business."""

    def __init__(self) -> None:
        self._others = {inode for _, inode in _sockets()}

    def shut(self) -> None:
        for fd, inode in _sockets():
            if inode not in self._others:
                _shut(fd, inode)


def _sockets() -> Iterator[tuple[int, int]]:
    for entry in Path("/dev/fd").iterdir():
        with suppress(OSError):
            found = os.fstat(int(entry.name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(entry.name), found.st_ino


def _shut(fd: int, inode: int) -> None:
    """Only what is connected: gloo's thread that accepts connections must not find its listener broken."""
    # A number of our own, and then a look at what it stands for: another thread may have closed the first one.
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
        if os.fstat(ours.fileno()).st_ino == inode:
            ours.getpeername()
            ours.shutdown(socket.SHUT_RDWR)

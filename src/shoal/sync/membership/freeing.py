"""Frees a rank that is stuck in an exchange, by shutting down the connections it exchanges over.

gloo's own `abort` and `shutdown` free nobody; a socket that is shut down does, in milliseconds, whoever waits on it.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from shoal.sync.sockets import own_sockets


class Connections:
    """Those that this process has made since this object was: what was open before is somebody else's business."""

    def __init__(self) -> None:
        self._others = {inode for inode, _ in own_sockets()}

    def shut(self) -> None:
        for inode, found in own_sockets():
            if inode not in self._others:
                _shut(found)


def _shut(found: socket.socket) -> None:
    """Only what is connected: gloo's thread that accepts connections must not find its listener broken."""
    with suppress(OSError):
        found.getpeername()
        found.shutdown(socket.SHUT_RDWR)

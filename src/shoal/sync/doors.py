"""Gloo's ports, once everybody has come through them.

Each rank's gloo listens as long as its group lives, and keeps every connection that anybody ever makes there, also one
that was closed again (torch 2.13: 1,200 strangers are 1,200 open files until the rank ends). It cannot be told to stop,
and to close its socket under it would end the process. So the kernel is asked to drop whatever arrives at these
sockets: connections that stand are sockets of their own and feel nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import Collection, Iterator

from shoal.sync.sockets import own_sockets

_ATTACH_FILTER = 26
# One instruction of the classic packet filter: return 0, keep nothing of it.
_DROP_EVERYTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)


def listeners() -> frozenset[int]:
    """The inodes of the TCP sockets on which this process listens now."""
    return frozenset(inode for inode, _ in _listening())


def shut_doors(besides: Collection[int] = ()) -> int:
    """At every TCP port on which this process listens, `besides` those with these inodes: how many there were. Call it
    when the group has formed; a group that is made later opens a port of its own. Elsewhere than on Linux they stay
    open."""
    count = 0
    for inode, found in _listening():
        if inode not in besides:
            with contextlib.suppress(OSError):
                _drop_everything(found)
                count += 1
    return count


def _listening() -> Iterator[tuple[int, socket.socket]]:
    if sys.platform == "linux":
        for inode, found in own_sockets():
            # One that cannot be asked any more is closed.
            is_listening = False
            with contextlib.suppress(OSError):
                is_listening = _listens(found)
            if is_listening:
                yield inode, found


def _listens(found: socket.socket) -> bool:
    is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_everything(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(_DROP_EVERYTHING, len(_DROP_EVERYTHING))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))

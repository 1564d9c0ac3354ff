"""Waiting for an exchange, but not for longer than the generation lasts.

gloo tells a rank that waits to *receive* when a connection closes. One whose *send* waits for a peer that has left is
told nothing, and waits for the whole deadline (torch 2.13; seen in all-gathers and in a barrier). So the training waits
for futures of our own, which also end when the generation does; gloo's thread stays behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.futures import Future

from shoal.sync.fence import GenerationEnded

T = TypeVar("T")


class GroupInterrupt:
    """Frees whoever waits in a generation that is over. The same object for all generations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._is_over = False

    def begin(self) -> None:
        with self._lock:
            self._is_over = False

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.set_result(_over())

    def check(self) -> None:
        """Raises `GenerationEnded` when the generation is."""
        with self._lock:
            is_over = self._is_over
        if is_over:
            raise _over()

    def guard(self, future: Future[T]) -> Future[T]:
        """Ends as that one does, or when the generation does."""
        own: Future[Any] = Future()
        # Only an error that is raised in here is one for torch's C++ half, too.
        outcome: Future[T] = own.then(_unwrap)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._waiting.add(own)
        if is_over:
            own.set_result(_over())
        else:
            future.add_done_callback(lambda done: self._pass_on(own, done))
        return outcome

    def _pass_on(self, own: Future[Any], done: Future[T]) -> None:
        with self._lock:
            if own not in self._waiting:
                return
            self._waiting.discard(own)
        try:
            own.set_result(done.value())
        except Exception as error:
            own.set_result(error)


def await_work(work: dist.Work | None, release: GroupInterrupt | None) -> None:
    """Raises what the exchange raised, or `GenerationEnded`."""
    if work is None:
        return
    if release is not None and not work.is_completed():
        release.guard(work.get_future()).wait()
    work.wait()


def _over() -> GenerationEnded:
    return GenerationEnded("its generation was over before an exchange was")


def _unwrap(done: Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value


# SECTION sync/sockets
# The sockets of this process, whoever made them: gloo shows nobody its own.


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each with its inode, as a duplicate that is closed when the next one is asked for: whatever its owner does
    meanwhile, it stays the same socket, and to close it does not close the owner's."""
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    yield os.fstat(found.fileno()).st_ino, found


def accepted_and_opened() -> tuple[set[str], set[str]]:
    """This process's TCP connections as `address:port`: the remote ends of those that came in through a listening
    socket, and the local ends of all others. Processes that compare these sets find connections that none of them
    opened."""
    listening, connected = _tcp_ends()
    accepted = {remote for local, remote in connected if local in listening}
    return accepted, {local for local, _ in connected if local not in listening}


def count_accepted() -> Counter[str]:
    """The connections that came in through each listening socket of this process."""
    listening, connected = _tcp_ends()
    return Counter(local for local, _ in connected if local in listening)


def _tcp_ends() -> tuple[set[str], list[tuple[str, str]]]:
    """Where this process listens, and both ends of its connections."""
    listening: set[str] = set()
    connected: list[tuple[str, str]] = []
    for _, found in own_sockets():
        with suppress(OSError):
            if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            local = _end(found.getsockname())
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(local)
            else:
                connected.append((local, _end(found.getpeername())))
    return listening, connected


def _end(name: tuple[str, int]) -> str:
    address, port = name[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# SECTION sync/doors
# Gloo's ports, once everybody has come through them.
#
# Each rank's gloo listens as long as its group lives, and keeps every connection that anybody ever makes there, also
#
# one that was closed again (torch 2.13: 1,200 strangers are 1,200 open files until the rank ends). It cannot be told
# to stop, and to close its socket under it would end the process. So the kernel is asked to drop whatever arrives at
# these sockets: connections that stand are sockets of their own and feel nothing.


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


# SECTION sync/membership/freeing
# Frees a rank that is stuck in an exchange, by shutting down the connections it exchanges over.
#
# gloo's own `abort` and `shutdown` free nobody; a socket that is shut down does, in milliseconds, whoever waits on
# it.


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

"""Waits for collectives that end with the generation, and access to the sockets that gloo opens.

gloo wakes a rank that waits to *receive* when a connection closes. A rank whose *send* waits for a peer that has left
is not woken before the collective's timeout (torch 2.13; seen in all-gathers and in a barrier). So the training waits
for futures of its own, which also end with the generation; gloo's thread stays behind. gloo's `abort` and `shutdown` do
not wake a waiting rank either, but shutting down its sockets does, within milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.futures import Future

from shoal.sync.communication import communication
from shoal.sync.fence import GenerationEnded

T = TypeVar("T")


class GroupInterrupt:
    """Ends every wait of a generation when the generation ends. One object serves all generations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._aborts: list[Callable[[], None]] = []
        self._is_over = False

    def begin(self) -> None:
        with self._lock:
            self._is_over = False

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            pending, self._pending = self._pending, set()
            aborts, self._aborts = self._aborts, []
        for future in pending:
            future.set_result(_generation_ended())
        for abort in aborts:
            abort()

    def at_end(self, abort: Callable[[], None]) -> None:
        """Call `abort` when this generation ends: it wakes a rank that waits in another way than by a future."""
        with self._lock:
            self._aborts.append(abort)

    def check(self) -> None:
        """Raise `GenerationEnded` after the end of the generation."""
        with self._lock:
            is_over = self._is_over
        if is_over:
            raise _generation_ended()

    def guard(self, future: Future[T]) -> Future[T]:
        """Return a future that ends with the given one, or with the generation."""
        own: Future[Any] = Future()
        # torch's C++ half recognises only errors that are raised inside a callback.
        outcome: Future[T] = own.then(_unwrap)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._pending.add(own)
        if is_over:
            own.set_result(_generation_ended())
        else:
            future.add_done_callback(lambda done: self._forward(own, done))
        return outcome

    def _forward(self, own: Future[Any], done: Future[T]) -> None:
        with self._lock:
            if own not in self._pending:
                return
            self._pending.discard(own)
        try:
            own.set_result(done.value())
        except Exception as error:
            own.set_result(error)


@communication()
def await_work(work: dist.Work | None, release: GroupInterrupt | None) -> None:
    """Wait for a collective. Raise `PeerLost`, another error of the collective, or `GenerationEnded`."""
    if work is None:
        return
    if release is not None and not work.is_completed():
        release.guard(work.get_future()).wait()
    work.wait()


@communication()
def await_future(future: Future[T]) -> T:
    """Wait for the result of an exchange of several collectives. Raise `PeerLost` or another error of theirs."""
    return future.wait()


def _generation_ended() -> GenerationEnded:
    return GenerationEnded("the generation was over before the exchange was")


def _unwrap(done: Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value


# gloo does not expose its sockets, so they are looked up among the open files of this process.


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield every socket of this process with its inode.

    Each is a duplicate that is closed when the next one is requested: it stays the same socket whatever its owner does
    meanwhile, and closing it does not close the owner's.
    """
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as duplicate:
                    yield os.fstat(duplicate.fileno()).st_ino, duplicate


class Connections:
    """The sockets that this process has opened since this object was created."""

    def __init__(self) -> None:
        self._older_inodes = {inode for inode, _ in own_sockets()}

    def shut(self) -> None:
        """Shut down connected sockets. Listeners stay: gloo's accepting thread must not find its own broken."""
        for inode, sock in own_sockets():
            if inode not in self._older_inodes:
                with suppress(OSError):
                    sock.getpeername()
                    sock.shutdown(socket.SHUT_RDWR)


def accepted_and_opened() -> tuple[set[str], set[str]]:
    """Return this process's TCP connections as `address:port`: remote ends of accepted ones, local ends of all others.

    Processes that compare these sets find connections that none of them opened.
    """
    listening, connected = _tcp_endpoints()
    accepted = {remote for local, remote in connected if local in listening}
    return accepted, {local for local, _ in connected if local not in listening}


def count_accepted() -> Counter[str]:
    """Count the connections that came in through each listening socket of this process."""
    listening, connected = _tcp_endpoints()
    return Counter(local for local, _ in connected if local in listening)


def _tcp_endpoints() -> tuple[set[str], list[tuple[str, str]]]:
    """Return the addresses on which this process listens, and both ends of its connections."""
    listening: set[str] = set()
    connected: list[tuple[str, str]] = []
    for _, sock in own_sockets():
        with suppress(OSError):
            if _is_tcp(sock):
                local = _endpoint(sock.getsockname())
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(local)
                else:
                    connected.append((local, _endpoint(sock.getpeername())))
    return listening, connected


def _is_tcp(sock: socket.socket) -> bool:
    return sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)


def _endpoint(name: tuple[str, int]) -> str:
    address, port = name[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# Each rank's gloo listens as long as its group lives, and keeps every connection made there, even a closed one
# (torch 2.13: 1,200 foreign connections are 1,200 open files until the rank ends). It cannot be told to stop, and
# closing its socket would end the process. So the kernel drops whatever arrives at the listening sockets once the group
# has formed. Established connections are sockets of their own and are not affected.

_SO_ATTACH_FILTER = 26
# One instruction of the classic packet filter: return 0, which keeps nothing of the packet.
_DROP_EVERYTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)


def listeners() -> frozenset[int]:
    """Return the inodes of the TCP sockets on which this process listens now."""
    return frozenset(inode for inode, _ in _listening_sockets())


def close_listeners(except_inodes: Collection[int] = ()) -> int:
    """Drop new connections at every listening TCP socket but the given ones; return how many sockets were closed so.

    Call it when the group has formed: a later group opens its own port. Only Linux supports it.
    """
    count = 0
    for inode, listener in _listening_sockets():
        if inode not in except_inodes:
            with suppress(OSError):
                code = ctypes.create_string_buffer(_DROP_EVERYTHING, len(_DROP_EVERYTHING))
                program = struct.pack("HP", 1, ctypes.addressof(code))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                count += 1
    return count


def _listening_sockets() -> Iterator[tuple[int, socket.socket]]:
    if sys.platform != "linux":
        return
    for inode, sock in own_sockets():
        # A socket that cannot be queried any more has been closed.
        is_listening = False
        with suppress(OSError):
            is_listening = _is_tcp(sock) and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if is_listening:
            yield inode, sock

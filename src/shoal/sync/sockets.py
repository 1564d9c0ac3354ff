"""The sockets of this process, whoever made them: gloo shows nobody its own."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


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

"""A node: one machine of a cluster, and how a process is started on it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.control.process import physical_cores, tie_to
from shoal.control.route import interface_of

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """`slots` is how many ranks it takes, `cores` how many cores they share."""

    name: str
    address: str
    interface: str
    slots: int
    cores: int
    link_mbps: int | None = None


@dataclass(frozen=True)
class Meeting:
    """Where the ranks find each other: an address we have bound already, so no port is guessed."""

    address: str
    port: int
    fd: int


def local_node(slots: int) -> Node:
    return Node("local", LOOPBACK, interface_of(LOOPBACK) or "lo", slots, physical_cores())


def start_process(
    argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C at the terminal reaches the launcher, which then asks the ranks to finish.

    Tied to us before it becomes the program: a rank needs seconds to import torch, and when it could first ask for the
    same by itself, we may be gone (seen: ranks of a killed launcher that trained on as orphans).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=tie_to(os.getpid()),
        )


@contextlib.contextmanager
def bind(address: str) -> Iterator[Meeting]:
    """A listening socket on a free port of one address; rank 0 inherits it, and we let go of it once it has."""
    with socket.create_server((address, 0)) as listener:
        yield Meeting(address, listener.getsockname()[1], listener.fileno())

"""A node: one machine of a cluster, and how a process is started on it."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.control.machine import physical_cores
from shoal.control.process import prepare_child
from shoal.control.route import interface_of
from shoal.errors import RunFailed
from shoal.units import format_duration

LOOPBACK = "127.0.0.1"
# All ranks of a large world connect at once, before the store is there.
_BACKLOG = 1024


@dataclass(frozen=True)
class Project:
    """The user's files, here and as a copy on a machine that does not share our disk."""

    here: Path
    there: str

    def moved(self, path: str) -> str:
        """Where a file of ours is there; the project's top for what lies outside of it."""
        inside = Path(path).is_relative_to(self.here)
        return str(Path(self.there) / Path(path).relative_to(self.here)) if inside else self.there


@dataclass(frozen=True)
class Node:
    """`slots` is how many ranks it takes, `cores` how many cores they share; None for what its agent will find out.

    `python` and `project` are those on that machine; no `project` where it is the same as here. `cpu_only`: there is
    nothing else to compute on."""

    name: str
    address: str
    interface: str | None
    slots: int
    cores: int | None
    link_mbps: int | None = None
    threads: int | None = None
    python: str = sys.executable
    project: Project | None = None
    cpu_only: bool = False


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a script find each other: the first node's agent serves torch's own store there."""

    address: str
    port: int


def ranks_of(nodes: Sequence[Node], node: Node) -> range:
    """The numbers of a node's ranks: a launch counts them through the nodes in their order."""
    first = sum(each.slots for each in nodes[: nodes.index(node)])
    return range(first, first + node.slots)


def local_node(slots: int) -> Node:
    return Node("local", LOOPBACK, interface_of(LOOPBACK) or "lo", slots, physical_cores())


def start_process(
    argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = (), stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C at the terminal reaches the launcher, which then asks the ranks to finish.

    Tied to us before it becomes the program: a rank needs seconds to import torch, and when it could first ask for the
    same by itself, we may be gone (seen: ranks of a killed launcher that trained on as orphans). It begins with default
    signals, whatever this process ignores.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=prepare_child(os.getpid()),
        )


def listen_at(address: str, wanted: int) -> socket.socket:
    """A listening socket on one address, port 0 for any. Connections wait in it until a process serves them."""
    holder = reserve_port(address, wanted)
    holder.listen(_BACKLOG)
    return holder


def reserve_port(address: str, wanted: int) -> socket.socket:
    """Holds a port for a process that will listen on it: nobody else is given it, and torch's store may still bind it.

    Both allow the address to be used again, and neither of two such sockets is refused while none of them listens.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((address, wanted))
    except OSError as error:
        holder.close()
        raise RunFailed(
            f"port {wanted} of {address} cannot be used: {error.strerror}",
            why=_owner(wanted) or "the kernel does not say whose it is",
            fix="leave --port out: a free one is found; or end that process",
        ) from error
    return holder


def _owner(port: int) -> str:
    """Who listens there, as far as we may see."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            # Whose own end of a connection elsewhere has the same number is nobody to blame.
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                age_s = time.time() - process.create_time()
                return f"process {process.pid} has it, for {format_duration(age_s)}: {shlex.join(process.cmdline())}"
    return ""

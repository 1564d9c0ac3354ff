"""A node: one machine of a cluster, and processes and ports on this one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.control.processes import prepare_child
from shoal.errors import RunFailed
from shoal.host.facts import interface_of, this_machine_is_cpu_only
from shoal.host.memory import available_bytes
from shoal.host.network import family_of
from shoal.host.proc import describe_process, find_listeners
from shoal.host.topology import divide_cores, this_topology
from shoal.units import format_duration

LOOPBACK = "127.0.0.1"
# All ranks of a large world connect at once, before the store accepts connections.
_BACKLOG = 1024

Note = Callable[[str], None]  # receives a message for the user


@dataclass(frozen=True)
class Project:
    """The user's files, here and as a copy on a machine that does not share this disk."""

    here: Path
    there: str

    def moved(self, path: str) -> str:
        """Return where the copy of a file is; the top folder of the copy for a file outside the project."""
        inside = Path(path).is_relative_to(self.here)
        return str(Path(self.there) / Path(path).relative_to(self.here)) if inside else self.there


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    interface: str | None  # None: its agent finds out
    slots: int  # ranks it takes
    cores: int | None  # physical cores that its ranks can keep busy; None: its agent finds out
    link_mbps: int | None = None
    threads: int | None = None
    python: str = sys.executable  # the interpreter on that machine
    project: Project | None = None  # None where the project is the same folder as here
    cpu_only: bool = False  # no GPU there
    # What its ranks can take together, swap included; None: its agent finds out.
    free_memory_bytes: int | None = field(default=None, compare=False)
    core_speeds: tuple[int, ...] = ()  # of `Topology`: empty where all cores are equal

    @property
    def rank_threads(self) -> int | None:
        """The threads of each rank here: as the hosts file has it, or by the cores; None while those are not known."""
        return self.threads or (divide_cores(self.cores, self.slots, self.core_speeds) if self.cores else None)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a script meet: the first node's agent serves torch's own store there."""

    address: str
    port: int


def _no_texts(_: Mapping[str, str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class RunFiles:
    """What a run needs on a machine that does not share this disk."""

    project: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)  # large files by content digest, so that none is sent twice
    # Small files of the run folder. A function of where the large files are on that machine: one text names them.
    texts: Callable[[Mapping[str, str]], dict[str, str]] = _no_texts
    keeps_files: bool = True  # keep what the run writes there, as for a training
    join_words: tuple[str, ...] = ()  # what its owner types behind `shoal join ADDRESS:PORT`


def ranks_of(nodes: Sequence[Node], node: Node) -> range:
    """Return the rank numbers of a node: ranks are numbered through the nodes in their order."""
    first = sum(earlier.slots for earlier in nodes[: nodes.index(node)])
    return range(first, first + node.slots)


def local_node(slots: int) -> Node:
    node = own_node("local", LOOPBACK, interface_of(LOOPBACK) or "lo", slots)
    return replace(node, cpu_only=this_machine_is_cpu_only(), free_memory_bytes=available_bytes(with_swap=True))


def own_node(name: str, address: str, interface: str | None, slots: int = 1) -> Node:
    """Return this machine as a node."""
    topology = this_topology()
    return Node(name, address, interface, slots, topology.usable, core_speeds=topology.core_speeds)


# Processes and ports on this machine


def start_process(
    argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = (), stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: Ctrl-C reaches only the launcher, which then asks the ranks to finish.

    It is tied to this process before it becomes the program: a rank needs seconds to import torch before it could do so
    itself (seen: ranks of a killed launcher that trained on as orphans). It begins with default signal handling,
    whatever this process ignores.
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


def listen_at(address: str, port: int) -> socket.socket:
    """Return a listening socket on one address, any port for 0. Connections wait in it until a process serves them."""
    listener = reserve_port(address, port)
    listener.listen(_BACKLOG)
    return listener


def reserve_port(address: str, port: int) -> socket.socket:
    """Hold a port for a process that will listen on it: the kernel gives it to no other, and torch's store can bind it.

    Both sockets set SO_REUSEADDR, with which the kernel refuses neither of them while none listens.
    """
    holder = socket.socket(family_of(address))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((address, port))
    except OSError as error:
        holder.close()
        raise RunFailed(
            f"port {port} of {address} cannot be used: {error.strerror}",
            why=_describe_listener(port) or "the kernel does not show which process has it",
            fix="leave --port out: a free one is found; or end that process",
        ) from error
    return holder


def _describe_listener(port: int) -> str:
    """Describe the process that listens at a port; empty for another user's."""
    with contextlib.suppress(ProcessLookupError):
        for pid in (listener["pid"] for listener in find_listeners(port)):
            if pid:
                process = describe_process(pid)
                return f"process {pid} has it, for {format_duration(process['age_s'])}: {process['command']}"
    return ""

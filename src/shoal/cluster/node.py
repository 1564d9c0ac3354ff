"""A node: one machine of a cluster, the processes started on it, and a program to exchange JSON lines with there."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from shoal.control.processes import prepare_child
from shoal.errors import ControlError, RunFailed
from shoal.host.facts import interface_of
from shoal.host.network import family_of
from shoal.host.proc import describe_process, find_listeners
from shoal.host.topology import divide_cores, this_topology
from shoal.units import format_duration

LOOPBACK = "127.0.0.1"
# All ranks of a large world connect at once, before the store accepts connections.
_BACKLOG = 1024
# How long a program may take to end after its stdin was closed, and to die after SIGKILL.
_END_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 1.0
_MOST_ANSWER_BYTES = 16 << 20

Answer = dict[str, Any]
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
    return own_node("local", LOOPBACK, interface_of(LOOPBACK) or "lo", slots)


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


# A program on a node that answers JSON lines with JSON lines: for `doctor` and `probe`, before there is an agent there,
# and perhaps without torch.


class RemoteEnd(Protocol):
    """The process at the other end of two pipes: here, on an emulated node, or behind SSH."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def errors(self) -> str: ...
    def close(self) -> None: ...


class RemoteProgram:
    def __init__(self, node: str, process: RemoteEnd) -> None:
        self.node = node
        self._process = process
        self._buffer = bytearray()

    def ask(self, deadline_s: float, **request: Any) -> Answer:
        """Send a request and return its answer. Raise `ControlError` when the program has ended, does not answer in
        time, or answers with an error."""
        self.send(**request)
        return self.receive_answer(deadline_s, str(request.get("do", "")))

    def send(self, **request: Any) -> None:
        """Send a request without waiting for its answer, so that several nodes can work at once."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive_answer(self, deadline_s: float, about: str = "") -> Answer:
        line = self._read_line(time.monotonic() + deadline_s, about)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.node} answered something else than asked", why=line.decode(errors="replace")[:200]
            )
        if "error" in answer:
            raise ControlError(f"{self.node} could not {about or 'answer'}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.close()

    def _read_line(self, deadline: float, about: str) -> bytes:
        searched = 0  # a long line is not searched again with every block
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ControlError(
                    f"{self.node} gave no answer to {about!r} in time", why=self._process.errors().strip()
                )
            block = os.read(self._process.stdout.fileno(), 1 << 16)
            if not block:
                raise ControlError(
                    f"{self.node} ended before it answered {about!r}", why=self._process.errors().strip()
                )
            self._buffer += block
            if len(self._buffer) > _MOST_ANSWER_BYTES:
                self._buffer.clear()
                raise ControlError(
                    f"{self.node} answered {about!r} with a line of more than {_MOST_ANSWER_BYTES} bytes",
                    why="what answers there is not a program of shoal, or was tampered with",
                )
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class LocalProgram:
    """A program on this machine or on an emulated node; it ends when its stdin is closed."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        assert self._process.stdin is not None  # noqa: S101 - both were asked for
        assert self._process.stdout is not None  # noqa: S101
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            # A frozen process in a version 1 control group dies only when it is thawed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_TIMEOUT_S)
        self._errors.close()


def module_command(module: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-m", module]


@contextlib.contextmanager
def closing_all(programs: Mapping[str, RemoteProgram]) -> Iterator[None]:
    try:
        yield
    finally:
        # All at once: closing a frozen one takes seconds.
        with ThreadPoolExecutor(max_workers=max(1, len(programs))) as pool:
            list(pool.map(RemoteProgram.close, programs.values()))


def ask_each(
    programs: Mapping[str, RemoteProgram], requests: Mapping[str, Answer], deadline_s: float
) -> tuple[dict[str, Answer], dict[str, ControlError]]:
    """Ask several nodes at once, within one deadline for all; return their answers and errors."""
    deadline = time.monotonic() + deadline_s
    answers, errors = {}, {}
    for name, request in requests.items():
        programs[name].send(**request)
    for name, request in requests.items():
        try:
            answers[name] = programs[name].receive_answer(max(0.0, deadline - time.monotonic()), str(request["do"]))
        except ControlError as error:
            errors[name] = error
    return answers, errors

"""A node: one machine of a cluster, and how a process is started on it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
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

import psutil

from shoal.control.processes import prepare_child
from shoal.errors import ControlError, RunFailed
from shoal.host.facts import interface_of, physical_cores
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
class Rendezvous:
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


# SECTION cluster/cargo
# What a run needs on a machine that does not share our disk.


def _no_texts(_: Mapping[str, str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class RunFiles:
    """`files` are large and by a digest of their content, so that none is sent twice. `texts` are the small ones of the
    run folder: a function, because one of them says where on that machine the large ones lie. `stays`: what the
    run writes there is kept, as a training's is."""

    project: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    texts: Callable[[Mapping[str, str]], dict[str, str]] = _no_texts
    stays: bool = True


# SECTION cluster/talk
# A conversation with a program on a node: one JSON line asked, one JSON line answered.
#
# For looking around before a run (`doctor`, `probe`), where there is no agent yet and perhaps no torch either.


# How long a program may take to end once its stdin has, and to die.
_END_S = 2.0
_KILL_S = 1.0
_LONGEST_ANSWER = 16 << 20

Answer = dict[str, Any]


class RemoteEnd(Protocol):
    """What stands at the other end of two pipes: a process here, on an emulated node, or behind SSH."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def errors(self) -> str: ...
    def close(self) -> None: ...


class RemoteProgram:
    def __init__(self, node: str, speaker: RemoteEnd) -> None:
        self.node = node
        self._speaker = speaker
        self._heard = bytearray()

    def ask(self, deadline_s: float, **request: Any) -> Answer:
        """Raises `ControlError` when the program is gone, silent, or answers with an error."""
        self.send(**request)
        return self.hear(deadline_s, str(request.get("do", "")))

    def send(self, **request: Any) -> None:
        """Without waiting: to have several nodes at work at once, then `hear` each of them."""
        with contextlib.suppress(BrokenPipeError):
            self._speaker.stdin.write(json.dumps(request).encode() + b"\n")
            self._speaker.stdin.flush()

    def hear(self, deadline_s: float, about: str = "") -> Answer:
        line = self._line(time.monotonic() + deadline_s, about)
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
        self._speaker.close()

    def _line(self, deadline: float, about: str) -> bytes:
        searched = 0
        # Only in what is new: a long line is not searched again with every block.
        while (end := self._heard.find(b"\n", searched)) < 0:
            searched = len(self._heard)
            ready, _, _ = select.select([self._speaker.stdout], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._speaker.stdout.fileno(), 1 << 16) if ready else None
            if block is None:
                raise ControlError(
                    f"{self.node} gave no answer to {about!r} in time", why=self._speaker.errors().strip()
                )
            if not block:
                raise ControlError(
                    f"{self.node} ended before it answered {about!r}", why=self._speaker.errors().strip()
                )
            self._heard += block
            if len(self._heard) > _LONGEST_ANSWER:
                self._heard.clear()
                raise ControlError(
                    f"{self.node} answered {about!r} with a line of more than {_LONGEST_ANSWER} bytes",
                    why="what answers there is no program of shoal, or was tampered with",
                )
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line


class LocalProgram:
    """A speaker on this machine, or on an emulated node of it; it ends when its stdin does."""

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
            self._process.wait(timeout=_END_S)
        if self._process.poll() is None:
            self._process.kill()
            # A frozen process does not even die (version 1 control groups): it will when it is thawed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_S)
        self._errors.close()


def module_command(module: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-m", module]


@contextlib.contextmanager
def closing_all(talks: Mapping[str, RemoteProgram]) -> Iterator[None]:
    try:
        yield
    finally:
        # At once: to leave a frozen one behind takes seconds.
        with ThreadPoolExecutor(max_workers=max(1, len(talks))) as pool:
            list(pool.map(RemoteProgram.close, talks.values()))


def ask_each(
    talks: Mapping[str, RemoteProgram], requests: Mapping[str, Answer], deadline_s: float
) -> tuple[dict[str, Answer], dict[str, ControlError]]:
    """All at once: what each of them answered, or why not, within one deadline for all."""
    until = time.monotonic() + deadline_s
    answers, errors = {}, {}
    for name, request in requests.items():
        talks[name].send(**request)
    for name, request in requests.items():
        try:
            answers[name] = talks[name].hear(max(0.0, until - time.monotonic()), str(request["do"]))
        except ControlError as error:
            errors[name] = error
    return answers, errors

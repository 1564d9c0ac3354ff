"""Machines over SSH as a cluster: each with its own disk, its own Python and its own copy of what the run needs."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shoal.cluster.agent_link import (
    LINE_BYTES,
    AgentLink,
    FileReceiver,
    PipeLink,
    RefusedFiles,
    agent_command,
    read_head,
)
from shoal.cluster.hosts.copy import code_bundle, ensure_code, question
from shoal.cluster.hosts.facts import HostFacts, addresses, look, misfits, wanted_here
from shoal.cluster.hosts.setup import ReadyHost, make_ready
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import RemoteScript, on_each, variables
from shoal.cluster.node import LocalProgram, Node, Project, RemoteProgram, RunFiles, module_command, ranks_of
from shoal.control.processes import marks
from shoal.errors import ControlError, ShoalError
from shoal.run_folder import RunFolder

# SECTION cluster/hosts/link
# The connection to the agent of another machine, over SSH; mended when it breaks.
#
# What the run writes there comes home over it, piece by piece, into the same places of our run folder. SSH's own
# failure
# says nothing about the ranks: they go on, and what they did meanwhile is fetched when the connection is back.


# While the others hear the node's heartbeats we go on trying; when they have lost it too, we stop.
AGAIN_S = 3.0


class SshLink:
    """`errand` is the first line that the messenger there reads, see `launch.messenger`."""

    def __init__(
        self,
        ready: ReadyHost,
        spec: HostsSpec,
        run: Path,
        project: Project | None,
        errand: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._ready = ready
        self._spec = spec
        self._project = project
        self._errand = dict(errand)
        self._home = FileReceiver(run, ready.host.name, errand["ranks"], bool(errand["keeps"]))
        self._note = note
        self._refusals = RefusedFiles(note)
        self._lines: list[bytes] = []
        self._script: RemoteScript | None = None
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._attend, name=f"ssh {ready.host.name}", daemon=True)
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Kept until there is a connection."""
        with self._lock:
            if self._script is None:
                self._lines.append(line)
            else:
                self._script.send([line])

    def ended(self) -> str | None:
        return self._ended

    def is_reachable(self) -> bool:
        return self._script is not None

    def kill(self) -> None:
        """Only our end: the agent there was asked to end already, and its ranks die with it."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(timeout=5)

    def close(self) -> None:
        self.kill()

    def _attend(self) -> None:
        while not self._closed.is_set():
            try:
                if self._talk():
                    self._ended = "its agent ended"
                    return
            except ShoalError as error:
                if not self._errand["follow"]:
                    self._ended = f"{error.seen}: {error.why}"
                    return
                if isinstance(error, ControlError):
                    self._refusals.add(error.seen, error)
            except (OSError, ValueError) as error:
                # A full disk here, or nonsense from there: the agent goes on, and so do we.
                self._note(f"cannot keep what {self._ready.host.name} sends: {error}; trying again")
            # The agent is there, whatever became of the connection; when the others lose it too, we are told to go.
            self._closed.wait(AGAIN_S)
        self._ended = self._ended or "its connection was lost and did not come back"

    def _talk(self) -> bool:
        """One connection; True when the agent there has ended and everything is at home."""
        host = self._ready.host
        with RemoteScript(host, self._spec, own_session=True) as script:
            self._process = script.process
            script.start(self._messenger())
            script.send([json.dumps({**self._errand, "have": self._home.have()}).encode() + b"\n"])
            if self._errand["follow"]:
                self._note(f"the connection to {host.name} is back")
            self._errand["follow"] = True
            with self._connected(script):
                if self._receive(script.stdout):
                    return True
        if not self._closed.is_set():
            self._note(f"lost the connection to {host.name}; what runs there goes on if the machine does; trying again")
        return False

    @contextlib.contextmanager
    def _connected(self, script: RemoteScript) -> Iterator[None]:
        with self._lock:
            script.send(self._lines)
            self._lines = []
            self._script = script
        try:
            yield
        finally:
            with self._lock:
                self._script = None

    def _messenger(self) -> str:
        ready = self._ready
        folder = shlex.quote(self._project.moved(str(Path.cwd()))) if self._project else "/"
        known_by = marks(self._errand["folder"], "messenger")
        marked = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in known_by.items())
        return (
            leave_command(ready) + f"cd {folder}\n"
            f"PYTHONPATH={shlex.quote(ready.pythonpath)}${{PYTHONPATH:+:$PYTHONPATH}}\nexport PYTHONPATH\n"
            f"{marked}\n"
            f"exec {shlex.quote(ready.python)} -P -m shoal.cluster.hosts.messenger"
        )

    def _receive(self, stream: IO[bytes]) -> bool:
        """A piece that the node may not send is left out, and noted. After a line that cannot be read nothing can be
        understood any more: `ControlError`, and the messenger is started anew."""
        name = self._ready.host.name
        reader = _PipeReader(stream, name)
        while line := reader.line():
            head = read_head(line, name)
            if head.end:
                return True
            if head.begins is not None:
                self._home.start(head.begins)
                continue
            piece = reader.exactly(head.size)
            try:
                self._home.keep(head.path, head.offset, piece)
            except ControlError as error:
                self._refusals.add(head.path, error)
        return False


class _PipeReader:
    """Lines and exact amounts from an unbuffered pipe; empty at its end."""

    def __init__(self, stream: IO[bytes], sender: str) -> None:
        self._stream = stream
        self._sender = sender
        self._buffer = b""

    def line(self) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > LINE_BYTES:
                raise ControlError(
                    f"{self._sender} sent a line of more than {LINE_BYTES} bytes",
                    why="what answers there is no messenger of shoal, or was tampered with",
                )
            if not self._more():
                return b""
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._more():
                break
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def _more(self) -> bool:
        block = self._stream.read(1 << 16)
        self._buffer += block or b""
        return bool(block)


def leave_command(ready: ReadyHost) -> str:
    """Shell words that make `FOLDER/bin/shoal`: whoever sits at that machine has none else, to come back with."""
    place = shlex.quote(f"{PurePosixPath(ready.runs).parent}/bin")
    path = shlex.quote(ready.pythonpath)
    lines = ("#!/bin/sh", f'PYTHONPATH={path} exec {shlex.quote(ready.python)} -P -m shoal "$@"')
    text = " ".join(map(shlex.quote, lines))
    new = f"{place}/shoal.$$"
    return f"mkdir -p {place} && printf '%s\\n' {text} > {new} && chmod 755 {new} && mv {new} {place}/shoal\n"


@dataclass(frozen=True)
class HostsCluster:
    spec: HostsSpec
    ready: dict[str, ReadyHost]
    nodes: list[Node]
    cargo: RunFiles
    note: Callable[[str], None]

    @classmethod
    def prepare(cls, spec: HostsSpec, cargo: RunFiles, note: Callable[[str], None]) -> HostsCluster:
        """Everything that can be wrong with a host is found here, before anything runs on any of them."""
        found = make_ready(spec, cargo.project, cargo.files, note)
        return cls(spec, {each.host.name: each for each in found}, [_node(each, cargo) for each in found], cargo, note)

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        ready = self.ready[node.name]
        if ready.here:
            return PipeLink(agent_command(run, node.name, ready.python), run, node.name)
        errand = {
            "folder": self.folder(node, run),
            "node": node.name,
            "ranks": list(ranks_of(self.nodes, node)),
            "texts": self.cargo.texts(ready.files),
            "keeps": node is self.nodes[0] and not any(each.here for each in self.ready.values()),
            "follow": False,
            "discard": not self.cargo.stays,
        }
        return SshLink(ready, self.spec, run, node.project, errand, self.note)

    def folder(self, node: Node, run: Path) -> str:
        """Called after the run here, and told apart from any other runs/first, of this machine or another one."""
        ready = self.ready[node.name]
        if ready.here:
            return str(run)
        return f"{ready.runs}/{run.name}-{RunFolder(run).identity()}"


def planned(host: Host) -> Node:
    """What the file alone says, for `--dry-run`."""
    return Node(host.name, host.address or host.host, host.interface, host.slots, None, threads=host.threads)


def _node(ready: ReadyHost, cargo: RunFiles) -> Node:
    host = ready.host
    project = Project(cargo.project, ready.project) if cargo.project and ready.project and not ready.here else None
    return Node(
        name=host.name,
        address=ready.address,
        interface=ready.interface,
        slots=host.slots,
        cores=ready.cores,
        link_mbps=ready.link_mbps,
        threads=host.threads,
        python=ready.python,
        project=project,
    )


# SECTION cluster/hosts/visit
# Talking to a program on a host before anything is set up there: any Python that can read our code will do.


def visit(spec: HostsSpec, module: str) -> dict[str, RemoteProgram | ShoalError]:
    """A conversation with the module on every host, or why there is none; all at once."""
    code = code_bundle()

    def start(host: Host) -> RemoteProgram:
        if is_here(host):
            return RemoteProgram(host.name, LocalProgram(module_command(module)))
        facts = look(host, spec, question(code), any_python=True)
        python, path = _python(facts), ensure_code(host, spec, facts, code)
        script = RemoteScript(host, spec, own_session=True)
        try:
            # Not -P: a Python that is too old for it is to be heard of, not to fail over its command line.
            words = variables(python=python, PYTHONPATH=path, PYTHONSAFEPATH="1", module=module)
            script.start(words + 'export PYTHONPATH PYTHONSAFEPATH\ncd /\nexec "$python" -m "$module"')
        except BaseException:
            script.close()
            raise
        return RemoteProgram(host.name, script)

    return on_each(spec.hosts, start)


def _python(facts: HostFacts) -> str:
    """The one that ranks would get; where none of them will do, the first, which then says what it lacks."""
    fitting = [python for python in facts.pythons if not misfits(python, wanted_here())]
    return (fitting or list(facts.pythons))[0].executable


def hosts_as_nodes(spec: HostsSpec) -> list[Node]:
    """With the addresses that ranks would use, found without asking any host."""
    known = addresses(spec)
    return [
        Node(host.name, known[host.name], host.interface, host.slots, None, threads=host.threads) for host in spec.hosts
    ]

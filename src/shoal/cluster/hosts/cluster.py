"""Machines over SSH as a cluster: each with its own disk, its own Python and its own copy of what the run needs.

A lost SSH connection says nothing about the ranks: they continue, and what they wrote meanwhile is fetched when the
connection is back.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
from shoal.cluster.hosts.copy import code_bundle, ensure_code, question
from shoal.cluster.hosts.facts import HostFacts, addresses, look, misfits, wanted_here
from shoal.cluster.hosts.setup import ReadyHost, make_ready
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import RemoteScript, on_each, variables
from shoal.cluster.node import Node, Note, Project, RunFiles, ranks_of
from shoal.cluster.node_program import LocalProgram, RemoteProgram, module_command
from shoal.cluster.transfer import LINE_BYTES, FileReceiver, RefusedFiles, parse_header
from shoal.control.processes import make_marks
from shoal.errors import ControlError, ShoalError
from shoal.run_folder import RunFolder

# The link reconnects for as long as the other agents receive the node's heartbeats.
RECONNECT_S = 3.0


@dataclass(frozen=True)
class HostsCluster:
    spec: HostsSpec
    ready: dict[str, ReadyHost]
    nodes: list[Node]
    run_files: RunFiles
    note: Note

    @classmethod
    def prepare(cls, spec: HostsSpec, run_files: RunFiles, note: Note) -> HostsCluster:
        """Prepare every host. What is wrong with one of them is found here, before anything runs on any of them."""
        hosts = make_ready(spec, run_files.project, run_files.files, note)
        return cls(
            spec,
            {ready.host.name: ready for ready in hosts},
            [_node(ready, run_files) for ready in hosts],
            run_files,
            note,
        )

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        ready = self.ready[node.name]
        if ready.here:
            return PipeLink(agent_command(run, node.name, ready.python), run, node.name)
        order = {
            "folder": self.folder(node, run),
            "node": node.name,
            "ranks": list(ranks_of(self.nodes, node)),
            "texts": self.run_files.texts(ready.files),
            "keeps": node is self.nodes[0] and not any(host.here for host in self.ready.values()),
            "follow": False,
            "discard": not self.run_files.keeps_files,
        }
        return SshLink(ready, self.spec, run, node.project, order, self.note)

    def folder(self, node: Node, run: Path) -> str:
        """Name the folder by the run and its identity: another run, here or elsewhere, may have the same name."""
        ready = self.ready[node.name]
        if ready.here:
            return str(run)
        return f"{ready.runs}/{run.name}-{RunFolder(run).identity()}"


def planned_node(host: Host) -> Node:
    """Return what the hosts file alone says, for `--dry-run`."""
    return Node(host.name, host.address or host.host, host.interface, host.slots, None, threads=host.threads)


def hosts_as_nodes(spec: HostsSpec) -> list[Node]:
    """Return nodes with the addresses that ranks would use, found without connecting to a host."""
    known = addresses(spec)
    return [replace(planned_node(host), address=known[host.name]) for host in spec.hosts]


def _node(ready: ReadyHost, run_files: RunFiles) -> Node:
    host = ready.host
    project = (
        Project(run_files.project, ready.project) if run_files.project and ready.project and not ready.here else None
    )
    return Node(
        name=host.name,
        address=ready.address,
        interface=ready.interface,
        slots=host.slots,
        cores=None,
        link_mbps=ready.link_mbps,
        threads=host.threads,
        python=ready.python,
        project=project,
    )


class SshLink:
    """A link to the agent of another machine over SSH, which reconnects when it breaks. The files that the run writes
    there arrive over it in pieces and go to the same places of the run folder here."""

    sends_files = True

    def __init__(
        self,
        ready: ReadyHost,
        spec: HostsSpec,
        run: Path,
        project: Project | None,
        order: Mapping[str, Any],
        note: Note,
    ) -> None:
        """`order` is the first line that the messenger there reads, a `MessengerOrder`."""
        self._ready = ready
        self._spec = spec
        self._project = project
        self._order = dict(order)
        self._files = FileReceiver(run, ready.host.name, order["ranks"], bool(order["keeps"]))
        self._note = note
        self._refused = RefusedFiles(note)
        self._lines: list[bytes] = []  # orders that wait for a connection
        self._script: RemoteScript | None = None
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_connected, name=f"ssh {ready.host.name}", daemon=True)
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Send an order now, or when there is a connection."""
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
        """Close only this end: the agent was asked to end already, and its ranks die with it."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(timeout=5)

    def close(self) -> None:
        self.kill()

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            try:
                if self._connect():
                    self._ended = "its agent ended"
                    return
            except ShoalError as error:
                if not self._order["follow"]:
                    self._ended = f"{error.seen}: {error.why}"
                    return
                if isinstance(error, ControlError):
                    self._refused.add(error.seen, error)
            except (OSError, ValueError) as error:
                # For example a full disk here, or invalid data from there: the agent continues, and so does the link.
                self._note(f"cannot write what {self._ready.host.name} sends: {error}; trying again")
            # The agent continues without the connection; when the other agents lose it too, the link is closed.
            self._closed.wait(RECONNECT_S)
        self._ended = self._ended or "its connection was lost and did not come back"

    def _connect(self) -> bool:
        """Use one connection to its end; return True when the agent has ended and every file is here."""
        host = self._ready.host
        with RemoteScript(host, self._spec, own_session=True) as script:
            self._process = script.process
            script.start(self._messenger_script())
            script.send([json.dumps({**self._order, "have": self._files.received()}).encode() + b"\n"])
            if self._order["follow"]:
                self._note(f"the connection to {host.name} is back")
            self._order["follow"] = True
            with self._lock:
                script.send(self._lines)
                self._lines = []
                self._script = script
            try:
                if self._receive(script.stdout):
                    return True
            finally:
                with self._lock:
                    self._script = None
        if not self._closed.is_set():
            self._note(f"lost the connection to {host.name}; its ranks continue if the machine does; trying again")
        return False

    def _messenger_script(self) -> str:
        ready = self._ready
        folder = shlex.quote(self._project.moved(str(Path.cwd()))) if self._project else "/"
        environment = make_marks(self._order["folder"], "messenger")
        marked = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        return (
            _install_command(ready) + f"cd {folder}\n"
            f"PYTHONPATH={shlex.quote(ready.pythonpath)}${{PYTHONPATH:+:$PYTHONPATH}}\nexport PYTHONPATH\n"
            f"{marked}\n"
            f"exec {shlex.quote(ready.python)} -P -m shoal.cluster.hosts.messenger"
        )

    def _receive(self, stream: IO[bytes]) -> bool:
        """Write the pieces that arrive; leave out and report one that the node may not send. Raise `ControlError` for a
        line that cannot be parsed: nothing after it can be, and the messenger must be started again."""
        name = self._ready.host.name
        with io.BufferedReader(cast(io.RawIOBase, stream)) as reader:
            while (line := reader.readline(LINE_BYTES + 1)).endswith(b"\n"):
                header = parse_header(line, name)
                if header.end:
                    return True
                if header.begins is not None:
                    self._files.start(header.begins)
                    continue
                piece = reader.read(header.size)
                try:
                    self._files.write(header.path, header.offset, piece)
                except ControlError as error:
                    self._refused.add(header.path, error)
        if len(line) > LINE_BYTES:
            raise ControlError(
                f"{name} sent a line of more than {LINE_BYTES} bytes",
                why="what answers there is not a messenger of shoal, or was tampered with",
            )
        return False


def _install_command(ready: ReadyHost) -> str:
    """Return a script that makes `FOLDER/bin/shoal`, the only shoal command on that machine, with which its user can
    rejoin the run."""
    place = shlex.quote(f"{PurePosixPath(ready.runs).parent}/bin")
    path = shlex.quote(ready.pythonpath)
    lines = ("#!/bin/sh", f'PYTHONPATH={path} exec {shlex.quote(ready.python)} -P -m shoal "$@"')
    text = " ".join(map(shlex.quote, lines))
    new = f"{place}/shoal.$$"
    return f"mkdir -p {place} && printf '%s\\n' {text} > {new} && chmod 755 {new} && mv {new} {place}/shoal\n"


def visit(spec: HostsSpec, module: str) -> dict[str, RemoteProgram | ShoalError]:
    """Start a module on every host at once, before anything is set up there: any Python that reads the code will do.

    Return a program to exchange requests with for each host, or the reason why there is none.
    """
    code = code_bundle()

    def start(host: Host) -> RemoteProgram:
        if is_here(host):
            return RemoteProgram(host.name, LocalProgram(module_command(module)))
        facts = look(host, spec, question(code), any_python=True)
        python, path = _python(facts), ensure_code(host, spec, facts, code)
        script = RemoteScript(host, spec, own_session=True)
        try:
            # Not -P: a Python that is too old for it shall report its version, not fail with a usage message.
            words = variables(python=python, PYTHONPATH=path, PYTHONSAFEPATH="1", module=module)
            script.start(words + 'export PYTHONPATH PYTHONSAFEPATH\ncd /\nexec "$python" -m "$module"')
        except BaseException:
            script.close()
            raise
        return RemoteProgram(host.name, script)

    return on_each(spec.hosts, start)


def _python(facts: HostFacts) -> str:
    """Return the Python that ranks would get; where none fits, the first, which then reports what it lacks."""
    fitting = [python for python in facts.pythons if not misfits(python, wanted_here())]
    return (fitting or list(facts.pythons))[0].executable

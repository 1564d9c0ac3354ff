"""Labs as clusters: the only way from shoal to `shoal_lab`, whose errors become shoal's here.

One process, the template of the lab, imports torch for the ranks of all emulated nodes (`train/template.py`). The
command that starts a training starts it first of all, and passes its socket to the supervisor. Each node's agent gets a
socket to a template of its own, which is forked from this one and enters the node.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import shoal_lab
from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
from shoal.cluster.node import Node, start_process
from shoal.config.presets import did_you_mean
from shoal.control.fork_request import LOAD_VARIABLES, TEMPLATE_FD, EnterRequest, send_request, template_command
from shoal.control.processes import TEMPLATE, make_marks
from shoal.control.rank_env import torch_caches
from shoal.errors import LabError, ShoalError, UsageError
from shoal.host.facts import this_machine_is_cpu_only
from shoal.host.memory import available_bytes
from shoal.host.topology import this_topology, threads_for
from shoal.run_folder import RunFolder
from shoal_lab import commands, spec
from shoal_lab.kernel import find_features, read_groups
from shoal_lab.lab import Lab
from shoal_lab.lab import Node as LabNode
from shoal_lab.processes import first_process
from shoal_lab.spec import DEFAULT_NAME, INTERFACE, LabSpec, make_spec
from shoal_lab.state import LabState

__all__ = ["LabCluster", "LabNode", "LabSpec", "LabTemplate", "ShoalLab"]

_KEYS = ("link", "delay", "loss", "cpu", "memory", "slots", "profile", "name")
_ON_FIX = "write for example: --on lab:3,link=1gbit,cpu=1/1/0.5"


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise an error of the lab as shoal's, with the same texts."""
    try:
        yield
    except shoal_lab.LabError as error:
        kind = UsageError if isinstance(error, shoal_lab.LabUsageError) else LabError
        raise kind(error.seen, why=error.why, fix=error.fix) from error


per_node = translate_errors()(spec.per_node)


class ShoalLab(Lab):
    """A lab whose errors are shoal's."""

    @classmethod
    def build(cls, spec: LabSpec, owner: int | None = None) -> Self:
        with translate_errors():
            return super().build(spec, owner)

    @classmethod
    def open(cls, name: str | None = None) -> Self:
        with translate_errors():
            return super().open(name)

    @property
    def state(self) -> LabState:
        with translate_errors():
            return super().state

    node = translate_errors()(Lab.node)
    command = translate_errors()(Lab.command)
    start = translate_errors()(Lab.start)
    perform = translate_errors()(Lab.perform)
    close = translate_errors()(Lab.close)


def require_lab() -> None:
    """Raise the reason where no lab can be made on this machine."""
    with translate_errors():
        find_features()


def can_limit_cpu() -> bool:
    """Tell whether a lab made here can limit the CPU of its nodes."""
    return read_groups().cpu is not None


def parse_lab(text: str) -> LabSpec:
    """Parse `lab:3`, or `lab:3,link=1gbit,delay=2ms,cpu=1/1/0.5,memory=2gb,slots=2,profile=wifi,sshd`, of `--on`."""
    kind, _, rest = text.strip().partition(":")
    count, *settings = rest.split(",")
    if kind != "lab" or not re.fullmatch(r"-?\d{1,9}", count):
        raise UsageError(f"--on {text!r} names no lab", why="a lab is written lab:NODES[,setting=value…]", fix=_ON_FIX)
    words: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key == "sshd" and not equals:
            continue
        if key not in _KEYS or not value or key in words:
            raise UsageError(f"--on {text}: cannot use {setting!r}", why=_setting_fault(key, value, words), fix=_ON_FIX)
        words[key] = value
    name = words.pop("name", DEFAULT_NAME)
    with translate_errors():
        return make_spec(int(count), name=name, sshd="sshd" in settings, **words)


def _setting_fault(key: str, value: str, seen: Iterable[str]) -> str:
    if key in seen:
        return f"{key} is given twice"
    if key in _KEYS and not value:
        return f"{key} has no value"
    if key == "device":
        return "emulated nodes share the devices of this machine; --set run.devices=cuda/cpu gives each rank one"
    return did_you_mean(key, (*_KEYS, "sshd")) or f"the settings of a lab are {', '.join(_KEYS)} and sshd"


def as_nodes(spec: LabSpec) -> list[Node]:
    topology, cpu_only, free_bytes = this_topology(), this_machine_is_cpu_only(), available_bytes(with_swap=True)
    ranks = sum(node.slots for node in spec.nodes)
    nodes = []
    for node in spec.nodes:
        # Nodes without a limit share the machine. More threads than cores would only wait for each other.
        share = threads_for(topology, len(spec.nodes))
        cores = share if node.cpu is None else max(1, min(int(node.cpu), topology.usable))
        link_mbps = round(node.link.rate_bps / 1e6) if node.link.rate_bps else None
        machine = Node(node.name, node.address, INTERFACE, node.slots, cores, link_mbps, cpu_only=cpu_only)
        part_bytes = free_bytes * node.slots // ranks
        limit_bytes = part_bytes if node.memory_bytes is None else node.memory_bytes
        nodes.append(replace(machine, free_memory_bytes=min(part_bytes, limit_bytes)))
    return nodes


class LabCluster:
    """A lab as a cluster: each node in its own namespaces, behind its own shaped link."""

    def __init__(self, lab: ShoalLab, template: LabTemplate | None = None) -> None:
        self._lab = lab
        self._template = template
        self.nodes = as_nodes(lab.state.spec)

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        command = self._lab.command(node.name, agent_command(run, node.name))
        first = first_process(self._lab.folder, node.name)
        if self._template is None or first is None:
            return PipeLink(command, run, node.name)
        groups = commands.group_files(node.name, self._lab.state.site(self._lab.folder))
        log = RunFolder(run).template_log(node.name)
        with self._template.serve_node(node.name, first, groups, log) or contextlib.nullcontext() as sock:
            if node == self.nodes[-1]:
                self._template.release()
            return PipeLink(command, run, node.name, template=sock and sock.fileno())

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


@contextlib.contextmanager
def starting_template(run: Path, env: Mapping[str, str]) -> Iterator[socket.socket | None]:
    """Start the template, with the variables that the ranks of all nodes share; yield its socket for the supervisor.

    It ends when both this process and the supervisor have closed that. None: ranks import torch themselves.
    """
    own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = None
    with own_end:
        with its_end, contextlib.suppress(OSError, ShoalError):
            variables = {**env, **torch_caches().variables, **LOAD_VARIABLES, **make_marks(run, TEMPLATE)}
            command = template_command(sys.executable, str(run), its_end.fileno())
            # The run folder does not exist yet.
            process = start_process(command, variables, Path(os.devnull), (its_end.fileno(),))
        try:
            yield own_end if process is not None else None
        finally:
            if process is not None:
                process.kill()
                process.wait()


class LabTemplate:
    """The supervisor's end."""

    def __init__(self, run: Path, sock: socket.socket) -> None:
        self._run = run
        self._socket = sock

    @classmethod
    def inherited(cls, run: Path) -> LabTemplate | None:
        """Return the template that the command has started; None if there is none."""
        fd = os.environ.pop(TEMPLATE_FD, None)
        return None if fd is None else cls(run, socket.socket(fileno=int(fd)))

    def serve_node(self, node: str, first: int, groups: Sequence[Path], log: Path) -> socket.socket | None:
        """Return the socket for the node's agent; None when the template has ended.

        `first` is the node's first process; messages of its template go to `log`.
        """
        for_agent, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        marks = {**make_marks(self._run, TEMPLATE), "SHOAL_NODE": node}
        request = EnterRequest(first, tuple(map(str, groups)), marks)
        log.parent.mkdir(parents=True, exist_ok=True)
        with its_end, contextlib.suppress(OSError), log.open("ab") as output:
            send_request(self._socket, request, (its_end.fileno(), output.fileno()))
            return for_agent
        for_agent.close()
        return None

    def release(self) -> None:
        """Let the template end once it has served all nodes."""
        self._socket.close()

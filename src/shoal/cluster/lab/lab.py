"""A lab that stands: find it, start processes on its nodes, change it, take it down."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.cluster.lab import registry, topology
from shoal.cluster.lab.apply import apply, resolve
from shoal.cluster.lab.changes import Change, Scene
from shoal.cluster.lab.enter import TIED, NodeProcess, listening_program, receive_listener, start_in_node
from shoal.cluster.lab.processes import first_process, running_in, started
from shoal.cluster.lab.removal import remove
from shoal.cluster.lab.spec import DEFAULT_NAME, INTERFACE, SWITCH, LabSpec, check_name
from shoal.cluster.lab.state import LabState
from shoal.cluster.lab.steps import Step
from shoal.cluster.lab.tools import reach_tools
from shoal.cluster.node import Node
from shoal.config.presets import did_you_mean
from shoal.control.machine import physical_cores
from shoal.errors import LabError, UsageError


class Lab:
    """By name; everything else is read from its folder when it is needed, since any command may change it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = registry.lab_folder(name)

    @classmethod
    def open(cls, name: str | None = None) -> Lab:
        """The lab of that name; without one the default lab, or the only one of the user's own."""
        lab = cls(check_name(name) if name else choose(registry.names()))
        _need_whole(lab)
        return lab

    @property
    def state(self) -> LabState:
        state = registry.read_state(self.name)
        if state is None:
            raise _missing(self.name)
        return state

    @property
    def nodes(self) -> list[Node]:
        return as_nodes(self.state.spec)

    def is_alive(self, node: str) -> bool:
        return first_process(self.folder, node) is not None

    def processes(self, node: str) -> list[tuple[int, str]]:
        """Number on the host, and command, of what runs on a node."""
        first = first_process(self.folder, node)
        return running_in(first) if first else []

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """`argv` with the prefix that runs it on the node (or on `switch`), in the folder we are in."""
        state = self.state
        if node != SWITCH:
            state.spec.node(node)
        if node in state.frozen:
            raise UsageError(
                f"{node} is frozen, and so would be whatever starts there",
                fix=f"shoal lab thaw {node} --name {self.name}",
            )
        return reach_tools(resolve(topology.command(node, state.site(self.folder), list(argv), Path.cwd())))

    def start(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> NodeProcess:
        """Like `cluster.node.start_process`, on a node. A socket passed to it must come from there, see `listen`."""
        return start_in_node(self.command(node, [*TIED, *argv]), env, log, pass_fds)

    def listen(self, node: str) -> socket.socket:
        """A listening socket at a free port of the node's address, held by us: to serve there, or to pass on."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = listening_program(self.state.spec.node(node).address, theirs.fileno())
            return receive_listener(ours, theirs, self.command(node, program))

    def plan(self, change: Change) -> tuple[LabState, list[Step]]:
        state = self.state
        alive = frozenset(node.name for node in state.spec.nodes if self.is_alive(node.name))
        return change(Scene(state, state.site(self.folder), alive))

    def perform(self, change: Change) -> None:
        with registry.locked():
            state, steps = self.plan(change)
            apply(steps)
            registry.write_state(state)

    def close(self) -> None:
        remove(self.name)


def as_nodes(spec: LabSpec) -> list[Node]:
    return [
        Node(
            node.name,
            node.address,
            INTERFACE,
            slots=1,
            cores=_cores(node.cpu, len(spec.nodes)),
            link_mbps=round(node.link.rate_bps / 1e6) if node.link.rate_bps else None,
        )
        for node in spec.nodes
    ]


def _cores(cpu: float | None, nodes: int) -> int:
    """Threads for a rank: more than it has cores to run on would only wait for each other.

    Nodes without a limit share the machine, so each counts on its part of it.
    """
    share = physical_cores() // nodes if cpu is None else round(cpu)
    return max(1, min(share, physical_cores()))


def choose(names: list[str]) -> str:
    """The default lab, or the only one that the user made; a lab that belongs to a process is only taken by name."""
    if DEFAULT_NAME in names:
        return DEFAULT_NAME
    own = [name for name in names if not has_owner(name)]
    if len(own) == 1:
        return own[0]
    if own:
        raise UsageError("which lab?", why=f"up are: {', '.join(own)}", fix=f"add --name {own[0]}")
    others = f"those that are up belong to runs: {', '.join(names)}" if names else ""
    raise UsageError("no lab is up", why=others, fix="make one: shoal lab up 3")


def has_owner(name: str) -> bool:
    """Whether the lab was made for a process, which takes it down when it ends: a run with `--on lab:N`, a test."""
    state = registry.read_state(name)
    return state is not None and state.owner is not None


def _need_whole(lab: Lab) -> None:
    if not lab.folder.is_dir():
        raise _missing(lab.name)
    state = registry.read_state(lab.name)
    fault = why_stale(lab.folder, state)
    if fault:
        raise LabError(f"lab {lab.name!r} is broken: {fault}", fix=f"shoal lab down --name {lab.name}")


def why_stale(folder: Path, state: LabState | None) -> str:
    """Why a lab's folder is only what is left of it; nothing when the lab stands."""
    if state is None:
        return "its notes are missing or unreadable"
    if not state.ready:
        return "it is still being built, or building it was interrupted"
    if first_process(folder, SWITCH) is None:
        return "its switch is gone, because the machine was restarted or somebody ended it"
    if state.owner and started(state.owner.pid) != state.owner.started:
        return f"the run it belonged to (process {state.owner.pid}) is gone"
    return ""


def _missing(name: str) -> UsageError:
    names = registry.names()
    return UsageError(
        f"there is no lab {name!r}",
        why=did_you_mean(name, names) or (f"up are: {', '.join(names)}" if names else "no lab is up"),
        fix=f"make it: shoal lab up 3 --name {name}",
    )

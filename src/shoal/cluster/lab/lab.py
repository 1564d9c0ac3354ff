"""A lab that stands: find it, start processes on its nodes, change it, take it down."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.agent_link import AgentLink as Agent_linkLink
from shoal.cluster.agent_link import PipeLink, agent_command
from shoal.cluster.lab import commands
from shoal.cluster.lab import state as lab_state
from shoal.cluster.lab.commands import (
    KillNamespace,
    LabSite,
    PidOf,
    RemoveControlGroup,
    RunCommand,
    Step,
    WaitForFile,
    Word,
    WriteFile,
    freeze,
    node_groups_on_disk,
    read_groups,
    render_step,
)
from shoal.cluster.lab.kernel import Features, lacks, observe, possible, reach_tools, substitutes, with_tools
from shoal.cluster.lab.processes import (
    TIED,
    NodeProcess,
    end_all,
    end_node,
    first_process,
    listening_program,
    receive_listener,
    running_in,
    start_in_node,
    started,
)
from shoal.cluster.lab.spec import DEFAULT_NAME, INTERFACE, SWITCH, LabLink, LabNode, LabSpec, check_name
from shoal.cluster.lab.state import LabOwner, LabState, cut, heal, with_node
from shoal.cluster.node import Node
from shoal.config.presets import did_you_mean
from shoal.errors import LabError, UsageError
from shoal.host.facts import physical_cores

# SECTION cluster/lab/apply
# Does what the topology says, step by step, and explains the step that failed.


_DEADLINE_S = 10.0
_POLL_S = 0.005


def apply(steps: Iterable[Step]) -> None:
    for step in steps:
        _do(step)


def _do(step: Step) -> None:
    match step:
        case RunCommand(words, log):
            _run(step, resolve(words), log)
        case WriteFile(path, text):
            _write(step, path, text)
        case WaitForFile(file, log):
            _await(step, file, log)
        case KillNamespace(pid):
            _kill(pid)
        case RemoveControlGroup(path):
            _remove_group(step, path)


def resolve(words: Sequence[Word]) -> list[str]:
    """Words with the numbers filled in. A node whose first process is gone cannot be entered."""
    return [_number(word) if isinstance(word, PidOf) else word for word in words]


def _number(pid: PidOf) -> str:
    node = pid.file.stem
    first = first_process(pid.file.parent, node)
    if first is None:
        lab = pid.file.parent.name
        raise LabError(f"{node} of lab {lab!r} is not running", fix=f"shoal lab start {node} --name {lab}")
    return str(first)


def _run(step: Step, argv: list[str], log: Path | None) -> None:
    try:
        with log.open("wb") if log else contextlib.nullcontext(subprocess.PIPE) as output:
            done = subprocess.run(
                argv,
                env=with_tools(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                errors="replace",
                timeout=_DEADLINE_S,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(step, str(error)) from error
    if done.returncode:
        raise _failed(step, (done.stderr if log is None else _tail(log)) or f"exit code {done.returncode}")


def _write(step: Step, path: Path, text: str) -> None:
    try:
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise _failed(step, str(error.strerror)) from error


def _await(step: Step, file: Path, log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not (file.exists() and file.stat().st_size):
        said = _tail(log)
        if said or time.monotonic() > deadline:
            raise _failed(step, said or f"nothing after {_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


def _kill(pid: PidOf) -> None:
    first = first_process(pid.file.parent, pid.file.stem)
    if first is not None:
        end_node(first)


def _remove_group(step: Step, path: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while path.is_dir():
        try:
            path.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise _failed(step, str(error.strerror)) from error
            time.sleep(0.01)


def _failed(step: Step, said: str) -> LabError:
    return LabError(
        f"a step of the lab failed: {said.strip()}",
        why=f"it was: {render_step(step)}",
        fix="shoal lab up --dry-run prints all steps; --debug shows where this one came from",
    )


def _tail(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# SECTION cluster/lab/removal
# Takes a lab down, whatever is left of it: a whole one, one whose building was killed half-way, or only its traces.


def remove(name: str) -> None:
    with lab_state.locked():
        remove_locked(name)


def remove_locked(name: str) -> None:
    """Idempotent. Processes are found by the mark they carry, not by the pid files: a killed `up` left no whole set."""
    site, nodes = _what_is_left(name)
    apply(step for node in nodes for step in freeze(site.groups, name, node, frozen=False))
    end_all(site.folder)
    apply(commands.down(nodes, site))


def removal_steps(name: str) -> list[Step]:
    site, nodes = _what_is_left(name)
    return commands.down(nodes, site)


def _what_is_left(name: str) -> tuple[LabSite, list[str]]:
    folder = lab_state.lab_folder(name)
    site = _site(name, folder)
    return site, node_groups_on_disk(site.groups, name)


def _site(name: str, folder: Path) -> LabSite:
    state = lab_state.read_state(name)
    if state:
        return state.site(folder)
    return LabSite(name, folder, rootless=os.geteuid() != 0, netem=False, groups=read_groups())


# SECTION cluster/lab/changes
# What can be done to a lab that stands: from its state to the next one, and the commands in between. Pure.


@dataclass(frozen=True)
class LabView:
    """A lab as it is now; `alive` are the nodes whose first process runs."""

    state: LabState
    site: LabSite
    alive: frozenset[str]

    def node(self, name: str, alive: bool = True) -> LabNode:
        node = self.state.spec.node(name)
        if alive and name not in self.alive:
            raise UsageError(
                f"{name} is not running", why="it was killed", fix=f"shoal lab start {name}{self.option()}"
            )
        return node

    def option(self) -> str:
        return f" --name {self.site.name}"

    def filters(self, after: LabState) -> list[Step]:
        """For each node that runs and whose rules are no longer what they were."""
        nodes = [node for node in after.spec.nodes if node.name in self.alive]
        changed = [node for node in nodes if after.rules(node) != self.state.rules(self.state.spec.node(node.name))]
        return [step for node in changed for step in commands.rules(node, self.site, after.rules(node))]


Outcome = tuple[LabState, list[Step]]
Change = Callable[[LabView], Outcome]


def set_link(name: str, change: Callable[[LabLink], LabLink]) -> Change:
    def outcome(scene: LabView) -> Outcome:
        node = scene.node(name)
        after = node.model_copy(update={"link": change(node.link)})
        if after.link.delay_s and not (scene.state.netem or scene.state.delay_line):
            raise UsageError(
                "this kernel cannot delay packets",
                why="it has no netem (sch_netem) and allows no packet sockets",
                fix="leave --delay out",
            )
        state = with_node(scene.state, after)
        return state, [*commands.link(after, scene.site, node.link), *scene.filters(state)]

    return outcome


def set_cpu(name: str, cpu: float | None) -> Change:
    def outcome(scene: LabView) -> Outcome:
        if scene.site.groups.cpu is None:
            raise UsageError(
                "this lab cannot limit the CPU",
                why="no control group with a cpu controller can be made here, or not without root",
                fix="run the lab as root",
            )
        node = scene.node(name).model_copy(update={"cpu": cpu})
        return with_node(scene.state, node), commands.cpu(node, scene.site)

    return outcome


def kill(name: str, silent: bool) -> Change:
    def outcome(scene: LabView) -> Outcome:
        node = scene.node(name)
        state, thaw = _stopped(scene, node, frozen=False) if name in scene.state.frozen else (scene.state, [])
        end = commands.kill(node, scene.site, silent)
        return state, [end[0], *thaw, end[1]] if silent else [*thaw, *end]

    return outcome


def restart(name: str) -> Change:
    def outcome(scene: LabView) -> Outcome:
        node = scene.node(name, alive=False)
        if name in scene.alive:
            raise UsageError(f"{name} is already running", fix=f"shoal lab status{scene.option()}")
        rules = commands.rules(node, scene.site, scene.state.rules(node)) if scene.state.filtered(node) else []
        server = commands.start_server(node, scene.site) if scene.state.spec.sshd else []
        return scene.state, [*commands.restart(node, scene.site), *rules, *server]

    return outcome


def stop_or_go(name: str, frozen: bool) -> Change:
    def outcome(scene: LabView) -> Outcome:
        return _stopped(scene, scene.node(name), frozen)

    return outcome


def _stopped(scene: LabView, node: LabNode, frozen: bool) -> Outcome:
    names = scene.state.frozen | {node.name} if frozen else scene.state.frozen - {node.name}
    return scene.state.model_copy(update={"frozen": names}), commands.stop_or_go(node, scene.site, frozen)


def cut_off(one: str, other: str | None, one_way: bool) -> Change:
    def outcome(scene: LabView) -> Outcome:
        if one == other:
            raise UsageError(f"{one} cannot be cut off from itself", fix=f"shoal lab cut {one}, from all others")
        state = cut(scene.state, one, other, one_way)
        return state, scene.filters(state)

    return outcome


def heal_cuts(one: str | None, other: str | None) -> Change:
    def outcome(scene: LabView) -> Outcome:
        state = heal(scene.state, one, other)
        return state, scene.filters(state)

    return outcome


def set_firewall(name: str, ports: tuple[str, ...] | None) -> Change:
    def outcome(scene: LabView) -> Outcome:
        node = scene.node(name, alive=False)
        others = {key: value for key, value in scene.state.firewalls.items() if key != name}
        mine = {} if ports is None else {node.name: ports}
        state = scene.state.model_copy(update={"firewalls": {**others, **mine}})
        return state, scene.filters(state)

    return outcome


class Lab:
    """By name; everything else is read from its folder when it is needed, since any command may change it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = lab_state.lab_folder(name)

    @classmethod
    def open(cls, name: str | None = None) -> Lab:
        """The lab of that name; without one the default lab, or the only one of the user's own."""
        lab = cls(check_name(name) if name else choose(lab_state.names()))
        _need_whole(lab)
        return lab

    @property
    def state(self) -> LabState:
        state = lab_state.read_state(self.name)
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
        return reach_tools(resolve(commands.command(node, state.site(self.folder), list(argv), Path.cwd())))

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
        return change(LabView(state, state.site(self.folder), alive))

    def perform(self, change: Change) -> None:
        with lab_state.locked():
            state, steps = self.plan(change)
            apply(steps)
            lab_state.write_state(state)

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
    state = lab_state.read_state(name)
    return state is not None and state.owner is not None


def _need_whole(lab: Lab) -> None:
    if not lab.folder.is_dir():
        raise _missing(lab.name)
    state = lab_state.read_state(lab.name)
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
    names = lab_state.names()
    return UsageError(
        f"there is no lab {name!r}",
        why=did_you_mean(name, names) or (f"up are: {', '.join(names)}" if names else "no lab is up"),
        fix=f"make it: shoal lab up 3 --name {name}",
    )


# SECTION cluster/lab/build
# Builds a lab: looks at the machine, writes down what is about to be made, and makes it; all of it or nothing.


def up(spec: LabSpec, owner: int | None = None) -> Lab:
    """`owner` is a process: when it ends, however, the lab is removed. Such a lab is as it was asked for or not at all:
    what the process measures in it is recorded as measured on that lab."""
    features = observe()
    if owner is not None and (missing := lacks(spec, features)):
        raise LabError(
            f"this machine cannot build that lab: {'; '.join(missing)}",
            why="a run in a lab without it would be recorded as one with it",
            fix="leave that setting out of --on, or build the lab yourself and see what it lacks: shoal lab up",
        )
    state = plan_state(spec, features, owner)
    with lab_state.locked():
        _make_room(spec.name)
        lab_state.make_folder(spec.name)
        try:
            lab_state.write_state(state)
            _start_watcher(state)
            apply(build_steps(state))
            lab_state.write_state(state.model_copy(update={"ready": True}))
        except BaseException:
            remove_locked(spec.name)
            raise
    return Lab(spec.name)


def plan_state(spec: LabSpec, features: Features, owner: int | None = None) -> LabState:
    return LabState(
        spec=possible(spec, features),
        rootless=features.rootless,
        netem=features.netem,
        delay_line=features.delay_line,
        groups=features.groups,
        notes=(*substitutes(spec, features), *lacks(spec, features)),
        owner=_owner(owner),
    )


def build_steps(state: LabState) -> list[Step]:
    site = state.site(lab_state.lab_folder(state.spec.name))
    filtered = [node for node in state.spec.nodes if state.filtered(node)]
    rules = [step for node in filtered for step in commands.rules(node, site, state.rules(node))]
    return [*commands.up(state.spec, site), *rules, *_servers(state, site)]


def _servers(state: LabState, site: LabSite) -> list[Step]:
    if not state.spec.sshd:
        return []
    servers = [step for node in state.spec.nodes for step in commands.start_server(node, site)]
    return [*commands.make_keys(state.spec, site), *servers]


def _owner(pid: int | None) -> LabOwner | None:
    if pid is None:
        return None
    began = started(pid)
    if began is None:
        raise UsageError(f"no process {pid} can own a lab", why="it has ended")
    return LabOwner(pid=pid, started=began)


def _make_room(name: str) -> None:
    """What an interrupted `up`, a reboot or a dead owner left is cleared away; a lab that stands is not."""
    folder = lab_state.lab_folder(name)
    if not folder.exists():
        return
    if not why_stale(folder, lab_state.read_state(name)):
        raise UsageError(
            f"lab {name!r} is already up",
            why="every lab needs a name of its own",
            fix=f"shoal lab down --name {name}, or give the new one another --name",
        )
    remove_locked(name)


def _start_watcher(state: LabState) -> None:
    """Before anything else is made: from here on the owner's end is noticed."""
    if state.owner is None:
        return
    name = state.spec.name
    marks = state.site(lab_state.lab_folder(name)).environment("watcher")
    owner = (str(state.owner.pid), str(state.owner.started))
    watch = (sys.executable, "-P", "-m", "shoal.cluster.lab.watch", name, *owner)
    subprocess.run(
        ("env", *marks, "setsid", "--fork", *watch),  # noqa: S607
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=os.sep,
    )


# SECTION cluster/lab/cluster
# A lab as a cluster: one rank a node, each in its own namespaces, behind its own shaped link.


class LabCluster:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.nodes = lab.nodes

    def start_agent(self, node: Node, run: Path) -> Agent_linkLink:
        return PipeLink(self._lab.command(node.name, agent_command(run, node.name)), run, node.name)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)

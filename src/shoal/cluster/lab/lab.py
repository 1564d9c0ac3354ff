"""A lab: build it, find it, start processes on its nodes, change it, remove it."""

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

from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
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
from shoal.cluster.lab.kernel import Features, find_features, lacks, possible, reach_tools, substitutes, with_tools
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
)
from shoal.cluster.lab.spec import INTERFACE, SWITCH, LabLink, LabNode, LabSpec, check_name
from shoal.cluster.lab.state import LabOwner, LabState, cut, heal, with_node
from shoal.cluster.lab.template import LabTemplate
from shoal.cluster.node import Node
from shoal.config.defaults import LAB_NAME
from shoal.config.presets import did_you_mean
from shoal.errors import LabError, UsageError
from shoal.host.proc import start_ticks
from shoal.host.topology import this_topology, threads_for
from shoal.run_folder import RunFolder

_STEP_TIMEOUT_S = 10.0
_POLL_S = 0.005


class Lab:
    """A lab by its name. Its state is read from its folder whenever it is needed, since any command may change it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = lab_state.lab_folder(name)

    @classmethod
    def open(cls, name: str | None = None) -> Lab:
        """Return the lab of that name; without one the default lab, or the user's only one."""
        lab = cls(check_name(name) if name else choose_lab(lab_state.list_labs()))
        if not lab.folder.is_dir():
            raise _missing(lab.name)
        if fault := why_stale(lab.folder, lab_state.read_state(lab.name)):
            raise LabError(f"lab {lab.name!r} is broken: {fault}", fix=f"shoal lab down --name {lab.name}")
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
        """Return the number (on the host) and command of every process on a node."""
        first = first_process(self.folder, node)
        return running_in(first) if first else []

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """Return `argv` with the prefix that runs it on the node (or on `switch`) in the current folder."""
        state = self.state
        if node != SWITCH:
            state.spec.node(node)
        if node in state.frozen:
            raise UsageError(
                f"{node} is frozen, and so would be any process that starts there",
                fix=f"shoal lab thaw {node} --name {self.name}",
            )
        return reach_tools(resolve(commands.command_on_node(node, state.site(self.folder), list(argv), Path.cwd())))

    def start(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> NodeProcess:
        """Start a process on a node, as `cluster.node.start_process` does here. A socket passed to it must come from
        that node, see `listen`."""
        return start_in_node(self.command(node, [*TIED, *argv]), env, log, pass_fds)

    def listen(self, node: str) -> socket.socket:
        """Return a listening socket at a free port of the node's address: to serve there, or to pass on."""
        local, remote = socket.socketpair()
        with local, remote:
            program = listening_program(self.state.spec.node(node).address, remote.fileno())
            return receive_listener(local, remote, self.command(node, program))

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
        remove_lab(self.name)


def choose_lab(names: list[str]) -> str:
    """Return the default lab, or the only one that the user made; a lab with an owner is chosen by name only."""
    if LAB_NAME in names:
        return LAB_NAME
    own = [name for name in names if not has_owner(name)]
    if len(own) == 1:
        return own[0]
    if own:
        raise UsageError("which lab?", why=f"up are: {', '.join(own)}", fix=f"add --name {own[0]}")
    others = f"those that are up belong to runs: {', '.join(names)}" if names else ""
    raise UsageError("no lab is up", why=others, fix="make one: shoal lab up 3")


def has_owner(name: str) -> bool:
    """Tell whether the lab was made for a process and is removed when that ends: a run with `--on lab:N`, a test."""
    state = lab_state.read_state(name)
    return state is not None and state.owner is not None


def why_stale(folder: Path, state: LabState | None) -> str:
    """Return why the lab of this folder does not work; an empty text when it does."""
    if state is None:
        return "its state file is missing or unreadable"
    if not state.ready:
        return "it is still being built, or building it was interrupted"
    if first_process(folder, SWITCH) is None:
        return "its switch is gone, because the machine was restarted or its process was killed"
    if state.owner and start_ticks(state.owner.pid) != state.owner.started:
        return f"the run it belonged to (process {state.owner.pid}) is gone"
    return ""


def _missing(name: str) -> UsageError:
    names = lab_state.list_labs()
    return UsageError(
        f"there is no lab {name!r}",
        why=did_you_mean(name, names) or (f"up are: {', '.join(names)}" if names else "no lab is up"),
        fix=f"make it: shoal lab up 3 --name {name}",
    )


def as_nodes(spec: LabSpec) -> list[Node]:
    topology = this_topology()
    nodes = []
    for node in spec.nodes:
        # Nodes without a limit share the machine. More threads than cores would only wait for each other.
        share = threads_for(topology, len(spec.nodes))
        cores = share if node.cpu is None else max(1, min(int(node.cpu), topology.usable))
        link_mbps = round(node.link.rate_bps / 1e6) if node.link.rate_bps else None
        nodes.append(Node(node.name, node.address, INTERFACE, node.slots, cores=cores, link_mbps=link_mbps))
    return nodes


class LabCluster:
    """A lab as a cluster: each node in its own namespaces, behind its own shaped link."""

    def __init__(self, lab: Lab, template: LabTemplate | None = None) -> None:
        self._lab = lab
        self._template = template
        self.nodes = lab.nodes

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


# Build a lab: all of it or nothing


def build_lab(spec: LabSpec, owner: int | None = None) -> Lab:
    """Build a lab. When the process `owner` ends, however that happens, the lab is removed.

    An owned lab must be exactly as asked for: what its owner measures is recorded as measured on that lab.
    """
    features = find_features()
    if owner is not None and (missing := lacks(spec, features)):
        raise LabError(
            f"this machine cannot build that lab: {'; '.join(missing)}",
            why="a run in a lab without it would be recorded as one with it",
            fix="leave that setting out of --on, or build the lab yourself and see what it lacks: shoal lab up",
        )
    state = plan_state(spec, features, owner)
    with lab_state.locked():
        _remove_stale(spec.name)
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
    lab_owner = None
    if owner is not None:
        started = start_ticks(owner)
        if started is None:
            raise UsageError(f"no process {owner} can own a lab", why="it has ended")
        lab_owner = LabOwner(pid=owner, started=started)
    return LabState(
        spec=possible(spec, features),
        rootless=features.rootless,
        netem=features.netem,
        delay_line=features.delay_line,
        groups=features.groups,
        notes=(*substitutes(spec, features), *lacks(spec, features)),
        owner=lab_owner,
    )


def build_steps(state: LabState) -> list[Step]:
    site = state.site(lab_state.lab_folder(state.spec.name))
    steps = commands.lab_steps(state.spec, site)
    for node in state.spec.nodes:
        steps += commands.filter_steps(node, site, state.rules(node)) if state.filtered(node) else []
    if state.spec.sshd:
        steps += commands.ssh_key_steps(state.spec, site)
        steps += [step for node in state.spec.nodes for step in commands.sshd_steps(node, site)]
    return steps


def _remove_stale(name: str) -> None:
    """Remove what an interrupted `up`, a reboot or a dead owner left; refuse when a lab of that name is up."""
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
    """Start the process that removes the lab when its owner ends. It comes first: nothing may be left from here on."""
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


# Remove a lab, or what is left of one


def remove_lab(name: str) -> None:
    with lab_state.locked():
        remove_locked(name)


def remove_locked(name: str) -> None:
    """Remove a lab; a second call does nothing. Its processes are found by the mark in their environment and not by pid
    files, of which a killed `up` leaves only some."""
    site, nodes = _find_remains(name)
    apply(step for node in nodes for step in freeze(site.groups, name, node, frozen=False))
    end_all(site.folder)
    apply(commands.removal_steps(nodes, site))


def removal_steps(name: str) -> list[Step]:
    site, nodes = _find_remains(name)
    return commands.removal_steps(nodes, site)


def _find_remains(name: str) -> tuple[LabSite, list[str]]:
    folder, state = lab_state.lab_folder(name), lab_state.read_state(name)
    if state:
        site = state.site(folder)
    else:
        site = LabSite(name, folder, rootless=os.geteuid() != 0, netem=False, groups=read_groups())
    return site, node_groups_on_disk(site.groups, name)


# Changes to a lab: pure functions from its present state to the next one and the steps in between


@dataclass(frozen=True)
class LabView:
    """A lab as it is now."""

    state: LabState
    site: LabSite
    alive: frozenset[str]  # nodes whose first process runs

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
        """Return the steps for every running node whose packet filter changes."""
        nodes = [node for node in after.spec.nodes if node.name in self.alive]
        changed = [node for node in nodes if after.rules(node) != self.state.rules(self.state.spec.node(node.name))]
        return [step for node in changed for step in commands.filter_steps(node, self.site, after.rules(node))]


Outcome = tuple[LabState, list[Step]]
Change = Callable[[LabView], Outcome]


def set_link(name: str, change: Callable[[LabLink], LabLink]) -> Change:
    def outcome(view: LabView) -> Outcome:
        node = view.node(name)
        after = node.model_copy(update={"link": change(node.link)})
        if after.link.delay_s and not (view.state.netem or view.state.delay_line):
            raise UsageError(
                "this kernel cannot delay packets",
                why="it has no netem (sch_netem) and allows no packet sockets",
                fix="leave --delay out",
            )
        state = with_node(view.state, after)
        return state, [*commands.link_steps(after, view.site, node.link), *view.filters(state)]

    return outcome


def set_cpu(name: str, cpu: float | None) -> Change:
    def outcome(view: LabView) -> Outcome:
        if view.site.groups.cpu is None:
            raise UsageError(
                "this lab cannot limit the CPU",
                why="no control group with a cpu controller can be made here, or not without root",
                fix="run the lab as root",
            )
        node = view.node(name).model_copy(update={"cpu": cpu})
        return with_node(view.state, node), commands.cpu_steps(node, view.site)

    return outcome


def kill_node(name: str, silent: bool) -> Change:
    def outcome(view: LabView) -> Outcome:
        node = view.node(name)
        state, thaw = _set_frozen(view, node, frozen=False) if name in view.state.frozen else (view.state, [])
        first, second = commands.kill_steps(node, view.site, silent)
        return state, [first, *thaw, second] if silent else [*thaw, first, second]

    return outcome


def restart_node(name: str) -> Change:
    def outcome(view: LabView) -> Outcome:
        node = view.node(name, alive=False)
        if name in view.alive:
            raise UsageError(f"{name} is already running", fix=f"shoal lab status{view.option()}")
        rules = view.state.rules(node)
        filters = commands.filter_steps(node, view.site, rules) if view.state.filtered(node) else []
        sshd = commands.sshd_steps(node, view.site) if view.state.spec.sshd else []
        return view.state, [*commands.restart_steps(node, view.site), *filters, *sshd]

    return outcome


def set_frozen(name: str, frozen: bool) -> Change:
    return lambda view: _set_frozen(view, view.node(name), frozen)


def _set_frozen(view: LabView, node: LabNode, frozen: bool) -> Outcome:
    names = view.state.frozen | {node.name} if frozen else view.state.frozen - {node.name}
    return view.state.model_copy(update={"frozen": names}), commands.freeze_steps(node, view.site, frozen)


def cut_off(one: str, other: str | None, one_way: bool) -> Change:
    def outcome(view: LabView) -> Outcome:
        if one == other:
            raise UsageError(f"{one} cannot be cut off from itself", fix=f"shoal lab cut {one}, from all others")
        state = cut(view.state, one, other, one_way)
        return state, view.filters(state)

    return outcome


def heal_cuts(one: str | None, other: str | None) -> Change:
    def outcome(view: LabView) -> Outcome:
        state = heal(view.state, one, other)
        return state, view.filters(state)

    return outcome


def set_firewall(name: str, ports: tuple[str, ...] | None) -> Change:
    def outcome(view: LabView) -> Outcome:
        node = view.node(name, alive=False)
        firewalls = {key: value for key, value in view.state.firewalls.items() if key != node.name}
        if ports is not None:
            firewalls[node.name] = ports
        state = view.state.model_copy(update={"firewalls": firewalls})
        return state, view.filters(state)

    return outcome


# Apply steps, and explain the one that failed


def apply(steps: Iterable[Step]) -> None:
    for step in steps:
        match step:
            case RunCommand(words, log):
                _run(step, resolve(words), log)
            case WriteFile(path, text):
                try:
                    path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
                except OSError as error:
                    raise _failed(step, str(error.strerror)) from error
            case WaitForFile(file, log):
                _await_content(step, file, log)
            case KillNamespace(pid):
                if (first := first_process(pid.file.parent, pid.file.stem)) is not None:
                    end_node(first)
            case RemoveControlGroup(path):
                _remove_group(step, path)


def resolve(words: Sequence[Word]) -> list[str]:
    """Replace `PidOf` by process numbers. A node whose first process is gone cannot be entered."""
    return [_resolve_pid(word) if isinstance(word, PidOf) else word for word in words]


def _resolve_pid(pid: PidOf) -> str:
    node, lab = pid.file.stem, pid.file.parent.name
    first = first_process(pid.file.parent, node)
    if first is None:
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
                timeout=_STEP_TIMEOUT_S,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(step, str(error)) from error
    if done.returncode:
        raise _failed(step, (done.stderr if log is None else _read_log(log)) or f"exit code {done.returncode}")


def _await_content(step: Step, file: Path, log: Path) -> None:
    deadline = time.monotonic() + _STEP_TIMEOUT_S
    while not (file.exists() and file.stat().st_size):
        output = _read_log(log)
        if output or time.monotonic() > deadline:
            raise _failed(step, output or f"nothing after {_STEP_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _remove_group(step: Step, path: Path) -> None:
    deadline = time.monotonic() + _STEP_TIMEOUT_S
    while path.is_dir():
        try:
            path.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise _failed(step, str(error.strerror)) from error
            time.sleep(0.01)


def _failed(step: Step, output: str) -> LabError:
    return LabError(
        f"a step of the lab failed: {output.strip()}",
        why=f"it was: {render_step(step)}",
        fix="shoal lab up --dry-run prints all steps; --debug shows where this one came from",
    )


def _read_log(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

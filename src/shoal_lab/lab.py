"""A lab: build it, find it, start processes on its nodes, change it, remove it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from shoal_lab import commands
from shoal_lab import state as lab_state
from shoal_lab.commands import (
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
    render_step,
)
from shoal_lab.errors import LabError, LabUsageError, did_you_mean
from shoal_lab.kernel import (
    Features,
    find_features,
    lacks,
    possible,
    reach_tools,
    read_groups,
    substitutes,
    with_tools,
)
from shoal_lab.processes import (
    TIED,
    NodeProcess,
    end_all,
    end_node,
    first_process,
    running_in,
    start_in_node,
    start_ticks,
)
from shoal_lab.spec import DEFAULT_NAME, SWITCH, LabSpec, NodeSpec, change_link, check_name
from shoal_lab.state import Change, LabOwner, LabState, LabView

_STEP_TIMEOUT_S = 10.0
_POLL_S = 0.005
_WATCH = (
    "import sys\nfrom shoal_lab.lab import remove_after\nremove_after(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
)


class Lab:
    """A lab by its name. Its state is read from its folder whenever it is needed, since any program may change it.

    `with Lab.build(make_spec(2)) as lab:` removes it at the end of the block.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = lab_state.lab_folder(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def build(cls, spec: LabSpec, owner: int | None = None) -> Self:
        """Build a lab: all of it or nothing. When the process `owner` ends, however that happens, the lab is removed.

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
                lab_state.write_state(replace(state, ready=True))
            except BaseException:
                remove_locked(spec.name)
                raise
        return cls(spec.name)

    @classmethod
    def open(cls, name: str | None = None) -> Self:
        """Return the lab of that name; without one the default lab, or the user's only one."""
        lab = cls(check_name(name) if name else choose_lab(lab_state.list_labs()))
        if not lab.folder.is_dir():
            raise _missing(lab.name)
        if fault := why_stale(lab.name):
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
        """All nodes, also killed ones."""
        return [Node(self, node.name) for node in self.state.spec.nodes]

    def node(self, name: str) -> Node:
        """Return the node of that name, such as `node1`."""
        return Node(self, self.state.spec.node(name).name)

    @property
    def places(self) -> list[Path]:
        """Return the folder and the control groups that exist while the lab does."""
        return [self.folder, *(group.of_lab(self.name) for group in read_groups().all())]

    def is_alive(self, node: str) -> bool:
        """Return whether the node is up and not killed."""
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
            raise LabUsageError(
                f"{node} is frozen, and so would be any process that starts there",
                fix=f"shoal lab thaw {node} --name {self.name}",
            )
        return reach_tools(resolve(commands.command_on_node(node, state.site(self.folder), list(argv), Path.cwd())))

    def start(
        self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> NodeProcess:
        """Start a process on a node; it ends with this process. `env` is added to the environment, output goes to
        `log`."""
        return start_in_node(self.command(node, [*TIED, *argv]), env, log, pass_fds)

    def plan(self, change: Change) -> tuple[LabState, list[Step]]:
        state = self.state
        alive = frozenset(node.name for node in state.spec.nodes if self.is_alive(node.name))
        return change(LabView(state, state.site(self.folder), alive))

    def perform(self, change: Change) -> None:
        with lab_state.locked():
            state, steps = self.plan(change)
            apply(steps)
            lab_state.write_state(state)

    def heal(self, node: str | None = None, other: str | None = None) -> None:
        """Undo the cut between two nodes, those of one, or all."""
        self.perform(lambda view: view.heal_cuts(node, other))

    def close(self) -> None:
        """Remove the lab, with everything that runs in it."""
        remove_lab(self.name)


class Node:
    """A node of a lab: what runs on it, and what can go wrong with it. Every change takes effect at once."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name

    @property
    def spec(self) -> NodeSpec:
        """Return its address, link and limits as they are now."""
        return self.lab.state.spec.node(self.name)

    @property
    def address(self) -> str:
        """Its address in the lab, such as `10.77.0.1`."""
        return self.spec.address

    @property
    def is_alive(self) -> bool:
        """Whether it is up and not killed."""
        return self.lab.is_alive(self.name)

    def run(self, *argv: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the node until it ends, and return its output and exit code."""
        words = self.lab.command(self.name, argv)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)

    def start(self, *argv: str, log: Path, env: Mapping[str, str] | None = None) -> NodeProcess:
        """Start a program on the node that runs until it ends, is killed, or this process ends."""
        return self.lab.start(self.name, argv, env or {}, log)

    def set_link(self, rate: str | None = None, delay: str | None = None, loss: str | None = None) -> None:
        """Change the node's link: a rate such as `20mbit` or `none`, a delay in one direction `5ms`, a loss `1%`."""
        self.lab.perform(lambda view: view.set_link(self.name, lambda link: change_link(link, rate, delay, loss)))

    def set_cpu(self, cores: float | None) -> None:
        """Limit how many cores the node can keep busy; None: as many as the machine has."""
        self.lab.perform(lambda view: view.set_cpu(self.name, cores))

    def set_memory(self, memory_bytes: int | None) -> None:
        """Limit the memory of all processes together: above it the kernel kills one of them. None: no limit."""
        self.lab.perform(lambda view: view.set_memory(self.name, memory_bytes))

    def freeze(self) -> None:
        """Freeze all processes, as when a laptop's lid is closed. Nothing can be started there until `thaw`."""
        self.lab.perform(lambda view: view.set_frozen(self.name, frozen=True))

    def thaw(self) -> None:
        """Let the frozen processes continue."""
        self.lab.perform(lambda view: view.set_frozen(self.name, frozen=False))

    def kill(self, silent: bool = False) -> None:
        """End all processes and remove the node from the network; `silent` as in a power cut: no connection is
        closed."""
        self.lab.perform(lambda view: view.kill_node(self.name, silent))

    def restart(self) -> None:
        """Start the killed node again, without processes, with the link and the limits that it had."""
        self.lab.perform(lambda view: view.restart_node(self.name))

    def cut(self, other: str | None = None, one_way: bool = False) -> None:
        """Drop every packet to and from another node, or all others; `one_way`: only what this node sends. `Lab.heal`
        undoes it."""
        self.lab.perform(lambda view: view.cut_off(self.name, other, one_way))

    def set_firewall(self, *ports: str) -> None:
        """Drop new connections from outside, except to these TCP ports, `22` or `29500-29600`."""
        allowed = commands.parse_ports(",".join(ports))
        self.lab.perform(lambda view: view.set_firewall(self.name, allowed))

    def remove_firewall(self) -> None:
        """Let all connections in again."""
        self.lab.perform(lambda view: view.set_firewall(self.name, None))


def choose_lab(names: list[str]) -> str:
    """Return the default lab, or the only one that the user made; a lab with an owner is chosen by name only."""
    if DEFAULT_NAME in names:
        return DEFAULT_NAME
    own = [name for name in names if not has_owner(name)]
    if len(own) == 1:
        return own[0]
    if own:
        raise LabUsageError("which lab?", why=f"up are: {', '.join(own)}", fix=f"add --name {own[0]}")
    others = f"those that are up belong to runs: {', '.join(names)}" if names else ""
    raise LabUsageError("no lab is up", why=others, fix="make one: shoal lab up 3")


def has_owner(name: str) -> bool:
    """Tell whether the lab was made for a process and is removed when that ends: a run with `--on lab:N`, a test."""
    state = lab_state.read_state(name)
    return state is not None and state.owner is not None


def why_stale(name: str) -> str:
    """Return why the lab of this name does not work; an empty text when it does."""
    state = lab_state.read_state(name)
    if state is None:
        return "its state file is missing or unreadable"
    if not state.ready:
        return "it is still being built, or building it was interrupted"
    if first_process(lab_state.lab_folder(name), SWITCH) is None:
        return "its switch is gone, because the machine was restarted or its process was killed"
    if state.owner and start_ticks(state.owner.pid) != state.owner.started:
        return f"the run it belonged to (process {state.owner.pid}) is gone"
    return ""


def _missing(name: str) -> LabUsageError:
    names = lab_state.list_labs()
    return LabUsageError(
        f"there is no lab {name!r}",
        why=did_you_mean(name, names) or (f"up are: {', '.join(names)}" if names else "no lab is up"),
        fix=f"make it: shoal lab up 3 --name {name}",
    )


# Build a lab


def plan_state(spec: LabSpec, features: Features, owner: int | None = None) -> LabState:
    lab_owner = None
    if owner is not None:
        started = start_ticks(owner)
        if started is None:
            raise LabUsageError(f"no process {owner} can own a lab", why="it has ended")
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
    if not lab_state.lab_folder(name).exists():
        return
    if not why_stale(name):
        raise LabUsageError(
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
    watch = (sys.executable, "-P", "-c", _WATCH, name, *owner)
    subprocess.run(
        ("env", *marks, "setsid", "--fork", *watch),  # noqa: S607
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=os.sep,
    )


def remove_after(name: str, owner: int, owner_start_ticks: int) -> None:
    """Wait until the owner has ended, then remove the lab.

    This runs in a process of its own, because a crash or SIGKILL that ends the owner must not end it.
    """
    with contextlib.suppress(ProcessLookupError):
        owner_fd = os.pidfd_open(owner)
        if start_ticks(owner) == owner_start_ticks:
            select.select([owner_fd], [], [])
    remove_lab(name)


# Remove a lab, or what is left of one


def remove_lab(name: str) -> None:
    with lab_state.locked():
        remove_locked(name)


def remove_locked(name: str) -> None:
    """Remove a lab; a second call does nothing. Its processes are found by the mark in their environment and not by pid
    files, of which a killed `up` leaves only some."""
    site, nodes = _find_remains(name)
    apply(step for node in nodes for step in freeze(node, site, frozen=False))
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
    return site, node_groups_on_disk(site)


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

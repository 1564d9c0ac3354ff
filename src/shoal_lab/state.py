"""The state of a lab and the changes to it. It is kept in the lab's folder as lab.json, for any program to find it.

The labs of a user on this machine are folders of one runtime folder, under one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_lab import commands
from shoal_lab.commands import ControlGroups, LabSite, Step, ruleset
from shoal_lab.errors import LabError, LabUsageError
from shoal_lab.spec import LabSpec, Link, NodeSpec

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LOCK_TIMEOUT_S = 60.0
_STATE_FILE = "lab.json"


@dataclass(frozen=True)
class LabOwner:
    """The process a lab belongs to."""

    pid: int
    started: int  # its start, in kernel ticks since boot: the kernel gives the number alone to other processes later


@dataclass(frozen=True)
class LabState:
    spec: LabSpec
    rootless: bool
    netem: bool
    groups: ControlGroups
    delay_line: bool = False
    notes: tuple[str, ...] = ()
    owner: LabOwner | None = None
    ready: bool = False  # False while it is being built
    cuts: frozenset[tuple[str, str]] = frozenset()  # (sender, receiver): packets of the first do not reach the second
    firewalls: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by node: the TCP ports that stay open
    frozen: frozenset[str] = frozenset()  # names of nodes

    def site(self, folder: Path) -> LabSite:
        return LabSite(self.spec.name, folder, self.rootless, self.netem, self.groups)

    def rules(self, node: NodeSpec) -> str:
        cut_from = [self.spec.node(sender).address for sender, receiver in self.cuts if receiver == node.name]
        return ruleset(cut_from, self.firewalls.get(node.name), 0.0 if self.netem else node.link.loss)

    def filtered(self, node: NodeSpec) -> bool:
        lossy = bool(node.link.loss) and not self.netem
        return lossy or node.name in self.firewalls or any(receiver == node.name for _, receiver in self.cuts)


# Changes to a lab: from its present state to the next one and the steps in between. Nothing runs here.

Outcome = tuple["LabState", list[Step]]
Change = Callable[["LabView"], Outcome]


@dataclass(frozen=True)
class LabView:
    """A lab as it is now, and what each change would make of it."""

    state: LabState
    site: LabSite
    alive: frozenset[str]  # nodes whose first process runs

    def set_link(self, name: str, change: Callable[[Link], Link]) -> Outcome:
        node = self._running(name)
        after = replace(node, link=change(node.link))
        if after.link.delay_s and not (self.state.netem or self.state.delay_line):
            raise LabUsageError(
                "this kernel cannot delay packets",
                why="it has no netem (sch_netem) and allows no packet sockets",
                fix="leave --delay out",
            )
        state = self._with_node(after)
        return state, [*commands.link_steps(after, self.site, node.link), *self._filters(state)]

    def set_cpu(self, name: str, cpu: float | None) -> Outcome:
        if self.site.groups.cpu is None:
            raise LabUsageError(
                "this lab cannot limit the CPU",
                why="no control group with a cpu controller can be made here, or not without root",
                fix="run the lab as root",
            )
        node = replace(self._running(name), cpu=cpu)
        return self._with_node(node), commands.cpu_steps(node, self.site)

    def set_memory(self, name: str, memory_bytes: int | None) -> Outcome:
        if self.site.groups.memory is None:
            raise LabUsageError(
                "this lab cannot limit memory",
                why="no control group with a memory controller can be made here, or not without root",
                fix="run the lab as root; one that an older shoal has made: shoal lab down, then shoal lab up",
            )
        node = replace(self._running(name), memory_bytes=memory_bytes)
        return self._with_node(node), commands.memory_steps(node, self.site)

    def kill_node(self, name: str, silent: bool) -> Outcome:
        node = self._running(name)
        state, thaw = self.set_frozen(name, frozen=False) if name in self.state.frozen else (self.state, [])
        first, second = commands.kill_steps(node, self.site, silent)
        return state, [first, *thaw, second] if silent else [*thaw, first, second]

    def restart_node(self, name: str) -> Outcome:
        node = self.state.spec.node(name)
        if name in self.alive:
            raise LabUsageError(f"{name} is already running", fix=f"shoal lab status{self._option}")
        filters = commands.filter_steps(node, self.site, self.state.rules(node)) if self.state.filtered(node) else []
        sshd = commands.sshd_steps(node, self.site) if self.state.spec.sshd else []
        return self.state, [*commands.restart_steps(node, self.site), *filters, *sshd]

    def set_frozen(self, name: str, frozen: bool) -> Outcome:
        node = self._running(name)
        names = self.state.frozen | {name} if frozen else self.state.frozen - {name}
        return replace(self.state, frozen=names), commands.freeze_steps(node, self.site, frozen)

    def cut_off(self, one: str, other: str | None, one_way: bool) -> Outcome:
        """Cut `one` off from `other`, or from all nodes. With `one_way` only what `one` sends is lost."""
        if one == other:
            raise LabUsageError(f"{one} cannot be cut off from itself", fix=f"shoal lab cut {one}, from all others")
        return self._filtered(replace(self.state, cuts=self.state.cuts | self._pairs(one, other, one_way)))

    def heal_cuts(self, one: str | None, other: str | None) -> Outcome:
        healed = self.state.cuts if one is None else self._pairs(one, other, one_way=False)
        return self._filtered(replace(self.state, cuts=self.state.cuts - healed))

    def set_firewall(self, name: str, ports: tuple[str, ...] | None) -> Outcome:
        node = self.state.spec.node(name)
        firewalls = {key: value for key, value in self.state.firewalls.items() if key != node.name}
        if ports is not None:
            firewalls[node.name] = ports
        return self._filtered(replace(self.state, firewalls=firewalls))

    @property
    def _option(self) -> str:
        return f" --name {self.site.name}"

    def _running(self, name: str) -> NodeSpec:
        node = self.state.spec.node(name)
        if name not in self.alive:
            raise LabUsageError(
                f"{name} is not running", why="it was killed", fix=f"shoal lab start {name}{self._option}"
            )
        return node

    def _with_node(self, node: NodeSpec) -> LabState:
        nodes = tuple(node if old.name == node.name else old for old in self.state.spec.nodes)
        return replace(self.state, spec=replace(self.state.spec, nodes=nodes))

    def _pairs(self, one: str, other: str | None, one_way: bool) -> frozenset[tuple[str, str]]:
        spec = self.state.spec
        spec.node(one)
        others = [spec.node(other).name] if other else [node.name for node in spec.nodes if node.name != one]
        outgoing = {(one, name) for name in others}
        return frozenset(outgoing if one_way else outgoing | {(name, one) for name in others})

    def _filtered(self, after: LabState) -> Outcome:
        return after, self._filters(after)

    def _filters(self, after: LabState) -> list[Step]:
        """Return the steps for every running node whose packet filter changes."""
        nodes = [node for node in after.spec.nodes if node.name in self.alive]
        changed = [node for node in nodes if after.rules(node) != self.state.rules(self.state.spec.node(node.name))]
        return [step for node in changed for step in commands.filter_steps(node, self.site, after.rules(node))]


# The labs of this user


def runtime_folder() -> Path:
    """Return a folder that a reboot empties, as it ends all labs; in /tmp only where this user has no other."""
    if os.geteuid() == 0:
        return Path("/run/shoal")
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if folder and os.access(folder, os.W_OK):
        return Path(folder) / "shoal"
    return Path(tempfile.gettempdir()) / f"shoal-{os.geteuid()}"


def lab_folder(name: str) -> Path:
    return runtime_folder() / "labs" / name


def list_labs() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in lab_folder("").iterdir() if path.is_dir())
    return []


def read_state(name: str) -> LabState | None:
    """Return None when the state file is missing or unreadable: such a lab can only be removed."""
    try:
        return _document().validate_json((lab_folder(name) / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_state(state: LabState) -> None:
    folder = lab_folder(state.spec.name)
    new = folder / f"{_STATE_FILE}.new"
    new.write_bytes(_document().dump_json(state, indent=2) + b"\n")
    new.replace(folder / _STATE_FILE)


@cache
def _document() -> TypeAdapter[LabState]:
    """Return the reader and writer of a state file. Imported late: the watcher of a lab waits for hours without it."""
    from pydantic import TypeAdapter

    return TypeAdapter(LabState)


def make_folder(name: str) -> None:
    lab_folder(name).mkdir(mode=0o700)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one command at a time change labs.

    The lock is on the folder itself and ends with the process that holds it, so a killed command blocks no other. The
    folder is removed with the last lab.
    """
    handle = _await_lock()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lab_folder("").rmdir()
            runtime_folder().rmdir()
        os.close(handle)


def _await_lock() -> int:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            return _try_lock()
        if time.monotonic() > deadline:
            raise LabError(
                f"another command has been changing labs for {_LOCK_TIMEOUT_S:.0f} s",
                why=f"it holds the lock on {lab_folder('')}",
                fix="see which: ps ax | grep 'shoal lab'",
            )
        time.sleep(0.02)


def _try_lock() -> int:
    folder = _own_folder(lab_folder(""))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the folder with its last lab; a lock on that one excludes no command.
        if os.fstat(handle).st_ino != folder.stat().st_ino:
            raise FileNotFoundError
    except OSError:
        os.close(handle)
        raise
    return handle


def _own_folder(folder: Path) -> Path:
    """Make the folder, or check its owner: in /tmp another user may have made it, and keys must not be put there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stats = [path.lstat() for path in (folder.parent, folder)]
    except FileExistsError:
        stats = []
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LabUsageError(
            f"cannot make {folder}: {error.strerror}",
            why="labs are kept there",
            fix="set XDG_RUNTIME_DIR to a folder of yours",
        ) from error
    if not stats or any(status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) for status in stats):
        raise LabUsageError(
            f"{folder} belongs to another user",
            why="labs are kept there",
            fix="set XDG_RUNTIME_DIR to a folder of yours",
        )
    return folder

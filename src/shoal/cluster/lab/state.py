"""The state of a lab: kept in its folder as lab.json, so that any command can find and change it.

The labs of a user on this machine are folders of one runtime folder, under one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from shoal.cluster.lab.commands import ControlGroups, LabSite, ruleset
from shoal.cluster.lab.spec import FrozenModel, LabNode, LabSpec
from shoal.errors import LabError, UsageError

_LOCK_TIMEOUT_S = 60.0
_STATE_FILE = "lab.json"


class LabOwner(FrozenModel):
    """The process a lab belongs to."""

    pid: int
    started: int  # its start, in kernel ticks since boot: the kernel gives the number alone to other processes later


class LabState(FrozenModel):
    spec: LabSpec
    rootless: bool
    netem: bool
    delay_line: bool = False
    groups: ControlGroups
    notes: tuple[str, ...] = ()
    owner: LabOwner | None = None
    ready: bool = False  # False while it is being built
    cuts: frozenset[tuple[str, str]] = frozenset()  # (sender, receiver): packets of the first do not reach the second
    firewalls: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # by node: the TCP ports that stay open
    frozen: frozenset[str] = frozenset()  # names of nodes

    def site(self, folder: Path) -> LabSite:
        return LabSite(self.spec.name, folder, self.rootless, self.netem, self.groups)

    def rules(self, node: LabNode) -> str:
        cut_from = [self.spec.node(sender).address for sender, receiver in self.cuts if receiver == node.name]
        return ruleset(cut_from, self.firewalls.get(node.name), 0.0 if self.netem else node.link.loss)

    def filtered(self, node: LabNode) -> bool:
        lossy = bool(node.link.loss) and not self.netem
        return lossy or node.name in self.firewalls or any(receiver == node.name for _, receiver in self.cuts)


def with_node(state: LabState, node: LabNode) -> LabState:
    nodes = tuple(node if old.name == node.name else old for old in state.spec.nodes)
    return state.model_copy(update={"spec": state.spec.model_copy(update={"nodes": nodes})})


def cut(state: LabState, one: str, other: str | None, one_way: bool) -> LabState:
    """Cut `one` off from `other`, or from all nodes. With `one_way` only what `one` sends is lost."""
    return state.model_copy(update={"cuts": state.cuts | _pairs(state, one, other, one_way)})


def heal(state: LabState, one: str | None, other: str | None) -> LabState:
    if one is None:
        return state.model_copy(update={"cuts": frozenset()})
    return state.model_copy(update={"cuts": state.cuts - _pairs(state, one, other, one_way=False)})


def _pairs(state: LabState, one: str, other: str | None, one_way: bool) -> frozenset[tuple[str, str]]:
    state.spec.node(one)
    others = [state.spec.node(other).name] if other else [node.name for node in state.spec.nodes if node.name != one]
    outgoing = {(one, name) for name in others}
    return frozenset(outgoing if one_way else outgoing | {(name, one) for name in others})


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
        return LabState.model_validate_json((lab_folder(name) / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def write_state(state: LabState) -> None:
    folder = lab_folder(state.spec.name)
    new = folder / f"{_STATE_FILE}.new"
    new.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
    new.replace(folder / _STATE_FILE)


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
        raise UsageError(
            f"cannot make {folder}: {error.strerror}",
            why="labs are kept there",
            fix="set XDG_RUNTIME_DIR to a folder of yours",
        ) from error
    if not stats or any(status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) for status in stats):
        raise UsageError(
            f"{folder} is not ours", why="another user made it", fix="set XDG_RUNTIME_DIR to a folder of yours"
        )
    return folder

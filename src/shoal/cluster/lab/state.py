"""What is known of a lab that stands: kept in its folder as lab.json, so that any command can find and change it."""

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


class LabOwner(FrozenModel):
    """The process a lab belongs to. A number alone could by now be somebody else's; with its start time it cannot."""

    pid: int
    started: int


class LabState(FrozenModel):
    """`cuts` are pairs: what the first sends, the second no longer hears. `ready` is false while it is being built."""

    spec: LabSpec
    rootless: bool
    netem: bool
    delay_line: bool = False
    groups: ControlGroups
    notes: tuple[str, ...] = ()
    owner: LabOwner | None = None
    ready: bool = False
    cuts: frozenset[tuple[str, str]] = frozenset()
    firewalls: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    def site(self, folder: Path) -> LabSite:
        return LabSite(self.spec.name, folder, self.rootless, self.netem, self.groups)

    def rules(self, node: LabNode) -> str:
        deaf_to = [self.spec.node(sender).address for sender, hearer in self.cuts if hearer == node.name]
        return ruleset(deaf_to, self.firewalls.get(node.name), 0.0 if self.netem else node.link.loss)

    def filtered(self, node: LabNode) -> bool:
        lossy = bool(node.link.loss) and not self.netem
        return lossy or node.name in self.firewalls or any(hearer == node.name for _, hearer in self.cuts)


def with_node(state: LabState, node: LabNode) -> LabState:
    nodes = tuple(node if each.name == node.name else each for each in state.spec.nodes)
    return state.model_copy(update={"spec": state.spec.model_copy(update={"nodes": nodes})})


def cut(state: LabState, one: str, other: str | None, one_way: bool) -> LabState:
    """Without `other`, from everybody. One way: what `one` sends is lost, and it still hears."""
    return state.model_copy(update={"cuts": state.cuts | _pairs(state, one, other, one_way)})


def heal(state: LabState, one: str | None, other: str | None) -> LabState:
    if one is None:
        return state.model_copy(update={"cuts": frozenset()})
    return state.model_copy(update={"cuts": state.cuts - _pairs(state, one, other, one_way=False)})


def _pairs(state: LabState, one: str, other: str | None, one_way: bool) -> frozenset[tuple[str, str]]:
    state.spec.node(one)
    others = [state.spec.node(other).name] if other else [node.name for node in state.spec.nodes if node.name != one]
    there = {(one, each) for each in others}
    return frozenset(there if one_way else there | {(each, one) for each in others})


# SECTION cluster/lab/registry
# The labs of this user on this machine: one folder each, under one lock.


_LOCK_DEADLINE_S = 60.0
_STATE_FILE = "lab.json"


def runtime_folder() -> Path:
    """Gone after a reboot, as labs are; /tmp only where the system has no such place for this user."""
    if os.geteuid() == 0:
        return Path("/run/shoal")
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.access(given, os.W_OK):
        return Path(given) / "shoal"
    return Path(tempfile.gettempdir()) / f"shoal-{os.geteuid()}"


def lab_folder(name: str) -> Path:
    return runtime_folder() / "labs" / name


def names() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in lab_folder("").iterdir() if path.is_dir())
    return []


def read_state(name: str) -> LabState | None:
    """None for a lab whose notes are missing or unreadable: such a one can only be taken down."""
    try:
        return LabState.model_validate_json((lab_folder(name) / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def write_state(state: LabState) -> None:
    folder = lab_folder(state.spec.name)
    fresh = folder / f"{_STATE_FILE}.new"
    fresh.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
    fresh.replace(folder / _STATE_FILE)


def make_folder(name: str) -> Path:
    folder = lab_folder(name)
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One command at a time changes labs. The lock is on the folder itself and ends with its holder, so a killed one
    blocks nobody; the folder goes with the last lab."""
    handle = _lock()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lab_folder("").rmdir()
            runtime_folder().rmdir()
        os.close(handle)


def _lock() -> int:
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            return _try_lock()
        if time.monotonic() > deadline:
            raise LabError(
                f"another command has been changing labs for {_LOCK_DEADLINE_S:.0f} s",
                why=f"it holds the lock on {lab_folder('')}",
                fix="see which: ps ax | grep 'shoal lab'",
            )
        time.sleep(0.02)


def _try_lock() -> int:
    folder = _own_folder(lab_folder(""))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed the folder with its last lab; a lock on that one excludes nobody.
        if os.fstat(handle).st_ino != folder.stat().st_ino:
            raise FileNotFoundError
    except OSError:
        os.close(handle)
        raise
    return handle


def _own_folder(folder: Path) -> Path:
    """In /tmp anybody can have made it first; keys and pid files are not put into a stranger's folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = [each.lstat() for each in (folder.parent, folder)]
    except FileExistsError:
        facts = []
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot make {folder}: {error.strerror}",
            why="labs are kept there",
            fix="set XDG_RUNTIME_DIR to a folder of yours",
        ) from error
    if not facts or any(fact.st_uid != os.geteuid() or not stat.S_ISDIR(fact.st_mode) for fact in facts):
        raise UsageError(
            f"{folder} is not ours", why="somebody else made it", fix="set XDG_RUNTIME_DIR to a folder of yours"
        )
    return folder

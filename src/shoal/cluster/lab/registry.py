"""The labs of this user on this machine: one folder each, under one lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from shoal.cluster.lab.state import LabState
from shoal.errors import LabError, UsageError

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

"""The processes of a lab: find, start and end them.

Every process that holds a lab up has the marks SHOAL_LAB and SHOAL_NODE in its environment. A pid file alone proves
nothing: it may be older than a reboot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shoal_lab.errors import LabError

_PROC = Path("/proc")
# Indices into `_stat_fields`.
_STATE, _PARENT, _FLAGS, _START_TICKS = 0, 1, 6, 19
_EXITING = 0x4  # PF_EXITING
_END_TIMEOUT_S = 10.0
_EXEC_TIMEOUT_S = 0.5
# Ties a program to its starter. It is used twice: for the parent on the node, and for the program that this starts.
TIED = ("setpriv", "--pdeathsig", "KILL", "--")


# Read /proc; what is missing, unreadable or of an ended process is empty


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _environment_of(pid: int) -> dict[str, str]:
    entries = (entry.partition("=") for entry in _read(pid, "environ").split("\0"))
    return {name: value for name, _, value in entries if name}


def _pid_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str((_PROC / str(pid) / "ns/pid").readlink())
    return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process state on: the name before it may contain any character."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields if len(fields) > _START_TICKS else []


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in kernel ticks since boot. With its number this identifies a process."""
    fields = _stat_fields(pid)
    return int(fields[_START_TICKS]) if fields else None


def is_dead(pid: int) -> bool:
    """Tell whether the process is gone, a zombie or exiting.

    The first process of a pid namespace stays until all others in it are reaped, which takes long where the machine's
    own first process is slow (seen: 3 s).
    """
    fields = _stat_fields(pid)
    return not fields or fields[_STATE] in ("Z", "X") or bool(int(fields[_FLAGS]) & _EXITING)


# Find


def holders(folder: Path) -> list[int]:
    """Return the processes that hold up the lab in this folder."""
    return [pid for pid in _all_pids() if _environment_of(pid).get("SHOAL_LAB") == str(folder)]


def first_process(folder: Path, node: str) -> int | None:
    """Return the node's first process; None when it does not run."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / f"{node}.pid").read_text(encoding="utf-8"))
        marks = _await_variables(pid)
        if (marks.get("SHOAL_LAB"), marks.get("SHOAL_NODE")) == (str(folder), node) and not is_dead(pid):
            return pid
    return None


def _await_variables(pid: int) -> dict[str, str]:
    """Read an empty environment again: a process has none for a moment while it becomes another program (seen)."""
    deadline = time.monotonic() + _EXEC_TIMEOUT_S
    while not (marks := _environment_of(pid)) and not is_dead(pid) and time.monotonic() < deadline:
        time.sleep(0.001)
    return marks


def running_in(first: int) -> list[tuple[int, str]]:
    """Return the number (on the host) and command of every process of a node but its first."""
    return [(pid, _command(pid)) for pid in _pids_in(_pid_namespace(first)) if pid != first]


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip() or "?"


def _pids_in(namespace: str) -> list[int]:
    return [pid for pid in _all_pids() if namespace and _pid_namespace(pid) == namespace and not is_dead(pid)]


# End


def end_all(folder: Path) -> None:
    """Kill the processes that hold up a lab, but not this one: the watcher of an owned lab is one of them.

    Repeats until none is left: one that was just being forked is not on the first list (seen).
    """
    _await_end(lambda: _kill_all(pid for pid in holders(folder) if pid != os.getpid()))


def _kill_all(pids: Iterable[int]) -> list[int]:
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def end_node(first: int) -> None:
    """Kill the first process of a pid namespace and wait until the kernel has closed the connections of all in it.

    A process that exits frees its memory before it closes its files: 1 s for 2.5 GB (seen). A cable that is removed
    meanwhile takes the end of its connections with it, and its peers wait.
    """
    namespace = _pid_namespace(first)
    _kill_all([first])
    _await_end(lambda: [pid for pid in _all_pids() if _pid_namespace(pid) == namespace != "" and _has_open_files(pid)])


def _has_open_files(pid: int) -> bool:
    """Tell whether a thread of the process still has files; the first thread may be gone before the others."""
    with contextlib.suppress(OSError):
        return any(_is_filled(thread / "fd") for thread in (_PROC / str(pid) / "task").iterdir())
    return False


def _is_filled(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(folder.iterdir())
    return False


def _await_end(list_remaining: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while remaining := list_remaining():
        if time.monotonic() > deadline:
            raise LabError(
                f"processes of the lab do not end: {', '.join(f'{pid} ({_command(pid)})' for pid in remaining)}",
                why="the kernel has not finished with them; a stuck disk or network file system does that",
                fix="shoal lab down, in a while",
            )
        time.sleep(0.01)


# Start


class NodeProcess(subprocess.Popen[bytes]):
    """A program on a node. `enter_node.py` is its parent and ends as it does, so `returncode` is the program's."""

    def send_signal(self, sig: int) -> None:
        """Signal the program, or, before it runs, the process that is about to become its parent."""
        if self.poll() is None:
            for pid in self.inner() or [self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)

    def inner(self) -> list[int]:
        return [pid for pid in _all_pids() if _stat_fields(pid)[_PARENT : _PARENT + 1] == [str(self.pid)]]


def start_in_node(argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()) -> NodeProcess:
    """Start a program in a session of its own, which ends with this process. `argv` has the prefix that enters the node
    already."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output:
            return NodeProcess(
                [*TIED, *argv],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_default_signals,
            )
    except OSError as error:
        raise LabError(f"cannot start {argv[-1]} on a node: {error.strerror}", fix="check: ulimit -u; df -h") from error


def _default_signals() -> None:
    """Give every signal its default action and unblock all, between fork and exec.

    A program inherits the signals that its parent ignores and blocks; one that a shell started in the background could
    not be interrupted. `subprocess` restores only what Python itself changed.
    """
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

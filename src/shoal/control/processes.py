"""How processes of a run hang together: marked as belonging to it, and gone when their parent goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.terminal import printable_line

_PR_SET_PDEATHSIG = 1
# Python ignores these in every process it runs, so that they become exceptions.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
RUN_MARK = "SHOAL_RUN"
PART_MARK = "SHOAL_PART"


def unmark() -> None:
    """For a marked process whose children are no part of the run in their own right, such as a lab's."""
    for name in (RUN_MARK, PART_MARK):
        os.environ.pop(name, None)


def marks(run: Path | str, part: str) -> dict[str, str]:
    """Variables by which a process is later known as ours, whatever its number and parent are by then."""
    return {RUN_MARK: str(run), PART_MARK: part}


def default_signals() -> None:
    """Gives every signal its default action and blocks none. For a child, between fork and exec.

    A program inherits what its parent ignores and blocks. A shell has its background jobs ignore SIGINT, and a rank
    that inherits it can never be asked to stop. `subprocess` restores only what Python itself changed.
    """
    for signum in signal.valid_signals():
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def restore_signals(signals: Iterable[int] | None = None) -> None:
    """The same for a Python program at its start, where SIGINT raises KeyboardInterrupt. For these signals, or all."""
    chosen = set(signal.valid_signals() if signals is None else signals) - _IGNORED_BY_PYTHON
    for signum in chosen:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, chosen)


def prepare_child(parent: int) -> Callable[[], None]:
    """What a rank does between fork and exec: it is tied to its parent and begins with default signals."""
    tie = tie_to(parent)

    def prepare() -> None:
        tie()
        default_signals()

    return prepare


def tie_to(parent: int) -> Callable[[], None]:
    """A function that has the kernel kill its caller when `parent` is gone, or at once if it is gone already.

    Linux only; elsewhere an orphaned rank ends at its next failed exchange, within `sync.timeout_s`. The library is
    opened here and not in the function, which may run between fork and exec, where nothing heavy is safe.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel


# SECTION launch/found
# The processes of runs on this machine, found by the marks they carry, whatever their parents are by now.


SUPERVISOR = "supervisor"
AGENT = "agent"
MESSENGER = "messenger"
# Who may have started an agent: a supervisor, the messenger at the end of SSH, or a verb that needs no supervisor.
_MODULES = {"shoal.runs.supervisor", "shoal.cluster.hosts.messenger"}
_VERBS = {"join", "doctor", "probe"}
# Of what a process says about itself.
_LONGEST_NAME, _LONGEST_COMMAND = 100, 2_000


@dataclass(frozen=True)
class RunProcess:
    """One process of a run. `part` is supervisor, agent, messenger (which stands between a supervisor elsewhere and
    the agent)
    or the name of a rank; a rank's own children carry its name too."""

    pid: int
    run: Path
    part: str
    node: str
    command: str
    started_at: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.started_at)


def find(run: Path | None = None) -> list[RunProcess]:
    """Of this user, and for root also of other users' own runs; those of one run, or of all."""
    return list(_look_at_all(run))


def find_supervisor(run: Path) -> RunProcess | None:
    return next((found for found in find(run) if found.part == SUPERVISOR), None)


def is_kept(processes: Iterable[RunProcess]) -> bool:
    """Whether somebody looks after a run: its supervisor, a messenger of one elsewhere, or whoever started the
    agent."""
    return any(
        found.part in (SUPERVISOR, MESSENGER) or (found.part == AGENT and _has_launcher(found.pid))
        for found in processes
    )


def _has_launcher(pid: int) -> bool:
    """An agent that was left alone descends from the machine's first process, or the session's, and nobody else."""
    with contextlib.suppress(psutil.Error):
        return any(_launches(ancestor.cmdline()) for ancestor in psutil.Process(pid).parents())
    return False


def _launches(words: list[str]) -> bool:
    is_shoal = any(Path(word).name == "shoal" for word in words)
    return not _MODULES.isdisjoint(words) or (is_shoal and not _VERBS.isdisjoint(words))


def is_running(pid: int) -> bool:
    """Of a process that is no child of ours; nobody has the number 0."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def is_alive(found: RunProcess) -> bool:
    now = _look_at(found.pid)
    return now is not None and now.started_at == found.started_at


def ask(processes: Iterable[RunProcess]) -> None:
    """To finish the step and save. Asked a second time, they end at once."""
    _signal(processes, signal.SIGINT)


def end(processes: Iterable[RunProcess]) -> None:
    _signal(processes, signal.SIGKILL)


def await_end(still_there: Callable[[], Iterable[RunProcess]], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(True for _ in still_there()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _signal(processes: Iterable[RunProcess], signum: signal.Signals) -> None:
    for found in processes:
        # Looked at again: in between it may have ended, and its number may be somebody else's.
        if is_alive(found):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found.pid, signum)


def _look_at_all(run: Path | None) -> Iterator[RunProcess]:
    for pid in psutil.pids():
        found = _look_at(pid, run) if pid != os.getpid() else None
        if found is not None:
            yield found


def _look_at(pid: int, wanted: Path | None = None) -> RunProcess | None:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        variables = process.environ()
        if RUN_MARK not in variables or process.status() == psutil.STATUS_ZOMBIE:
            return None
        run = Path(variables[RUN_MARK])
        if wanted not in (None, run) or not _may_belong(process, run):
            return None
        part, node = (printable_line(variables.get(name, ""), _LONGEST_NAME) for name in (PART_MARK, "SHOAL_NODE"))
        command = printable_line(shlex.join(process.cmdline()), _LONGEST_COMMAND)
        found = RunProcess(pid, run, part, node, command, process.create_time())
        # All of the above was read from one process, and not from the next with its number.
        return found if process.is_running() else None
    return None


def _may_belong(process: psutil.Process, run: Path) -> bool:
    """Any process can carry the name of any run in its environment: only those of this user or of the folder's owner
    are believed.

    A set-user-ID program such as sudo runs as root with the environment of the user who typed it.
    """
    owners = set(process.uids())
    if owners != {os.geteuid()} and owners != {run.stat().st_uid}:
        return False
    program = Path(f"/proc/{process.pid}/exe").stat() if sys.platform == "linux" else None
    return program is None or not program.st_mode & (stat.S_ISUID | stat.S_ISGID)

"""The processes of a run: environment marks that identify them, finding and ending them, and ties to their parent.

A process is found by its marks, whatever its parent is by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.host.proc import environment_of, is_setuid, stat_fields
from shoal.terminal import printable_line

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Indices into `stat_fields` of where the kernel reads /proc/PID/cmdline and /proc/PID/environ.
_ARGUMENTS_AT, _VARIABLES_AT = 45, 47
# Python ignores these in every process it runs, so that they become exceptions.
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
RUN_MARK = "SHOAL_RUN"
PART_MARK = "SHOAL_PART"
SUPERVISOR = "supervisor"
AGENT = "agent"
MESSENGER = "messenger"
TEMPLATE = "template"
# What may have started an agent: a supervisor, the messenger at the end of SSH, or a command that needs no supervisor.
_LAUNCHER_MODULES = {"shoal.runs.supervisor", "shoal.cluster.hosts.messenger"}
_LAUNCHER_COMMANDS = {"join", "doctor", "probe"}
_MAX_NAME, _MAX_COMMAND = 100, 2_000


def remove_own_marks() -> None:
    """Remove this process's marks, so that children do not inherit them: they are not parts of the run themselves."""
    for name in (RUN_MARK, PART_MARK):
        os.environ.pop(name, None)


def make_marks(run: Path | str, part: str) -> dict[str, str]:
    """Return the variables by which a process is later identified, whatever its pid and parent are by then."""
    return {RUN_MARK: str(run), PART_MARK: part}


def is_of_own_run(pid: int) -> bool:
    """Tell whether a process has the mark of the run that this process is part of.

    Folders of one name are one run: emulated nodes may have a copy each.
    """
    own, other = (environment_of(number).get(RUN_MARK, "") for number in (os.getpid(), pid))
    return bool(own) and Path(own).name == Path(other).name


def default_signals() -> None:
    """Give every signal its default action and unblock all. For a child, between fork and exec.

    A program inherits the signals that its parent ignores and blocks. A shell's background jobs ignore SIGINT, and a
    rank that inherits this can never be asked to stop. `subprocess` restores only what Python itself changed.
    """
    for signum in signal.valid_signals():
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def restore_signals(signals: Iterable[int] | None = None) -> None:
    """Do the same in a Python program at its start, where SIGINT raises KeyboardInterrupt; for these signals or all."""
    chosen = set(signal.valid_signals() if signals is None else signals) - IGNORED_BY_PYTHON
    for signum in chosen:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, chosen)


def prepare_child(parent: int) -> Callable[[], None]:
    """Return what a rank runs between fork and exec: it ties itself to its parent and resets its signals."""
    tie = tie_to(parent)

    def prepare() -> None:
        tie()
        default_signals()

    return prepare


def tie_to(parent: int) -> Callable[[], None]:
    """Return a function that has the kernel kill its caller when `parent` ends, or at once if it has ended already.

    Linux only; elsewhere an orphaned rank ends at its next failed exchange, within `sync.timeout_s`. libc is opened
    here and not in the function, which may run between fork and exec, where little is safe.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespace(namespace: int) -> None:
    """Enter an open namespace. The kernel refuses it to a process with several threads.

    `os.setns` came with Python 3.12. Of a pid namespace only the children are part that are forked afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def replace_identity(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Give a forked process its own variables, also where other processes read them: /proc/PID/environ and cmdline.

    The kernel shows the memory where it put both for the program that was started, so they are overwritten there. What
    is too long is cut; the marks come first.
    """
    # The C library must point at no variable that is overwritten.
    ctypes.CDLL(None).clearenv()
    os.environ.clear()
    os.environ.update(env)
    marks = {name: env[name] for name in (RUN_MARK, PART_MARK, "SHOAL_NODE") if name in env}
    variables = (f"{name}={value}" for name, value in {**marks, **env}.items())
    fields = stat_fields(os.getpid())
    for at, texts in ((_ARGUMENTS_AT, argv), (_VARIABLES_AT, variables)):
        begin, end = int(fields[at]), int(fields[at + 1])
        if 0 < begin < end:
            data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - begin - 1]
            ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


@dataclass(frozen=True)
class RunProcess:
    pid: int
    run: Path
    # "supervisor", "agent", "messenger" (between a supervisor on another machine and the agent), "template" (from which
    # ranks are forked), "store" (of a script), or the name of a rank, which the rank's own children carry too.
    part: str
    node: str
    command: str
    started_at: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.started_at)


def find_processes(run: Path | None = None) -> list[RunProcess]:
    """Return the processes of one run, or of all runs: of this user, and for root also of other users' own runs."""
    import psutil

    processes = (_inspect(pid, run) for pid in psutil.pids() if pid != os.getpid())
    return [process for process in processes if process is not None]


def find_supervisor(run: Path) -> RunProcess | None:
    return next((process for process in find_processes(run) if process.part == SUPERVISOR), None)


def has_supervisor(processes: Iterable[RunProcess]) -> bool:
    """Return whether a supervisor, the messenger of a remote one, or the command that started the agent still runs."""
    parts = {process.pid: process.part for process in processes}
    return any(
        part in (SUPERVISOR, MESSENGER) or (part == AGENT and _has_launcher(pid, parts)) for pid, part in parts.items()
    )


def _has_launcher(pid: int, parts: Mapping[int, str]) -> bool:
    """Return whether an ancestor is a launcher; an orphaned agent descends only from the first process.

    A process of the same run that is not an agent is a launcher too: another version of shoal may name its supervisor
    and the module differently. `parts` are the run's processes.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        above = psutil.Process(pid).parents()
        return any(parts.get(process.pid, AGENT) != AGENT or _is_launcher(process.cmdline()) for process in above)
    return False


def _is_launcher(argv: list[str]) -> bool:
    is_shoal = any(Path(word).name == "shoal" for word in argv)
    return not _LAUNCHER_MODULES.isdisjoint(argv) or (is_shoal and not _LAUNCHER_COMMANDS.isdisjoint(argv))


def is_running(pid: int) -> bool:
    """Return whether a process that is not a child of this one runs; false for 0, which is not a process."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def is_alive(process: RunProcess) -> bool:
    """Whether it is the same process still: the kernel may have given its number to another one.

    Start times are counted from the boot time, which the kernel computes from the clock in whole seconds: two readings
    may differ by a second.
    """
    now = _inspect(process.pid)
    return now is not None and abs(now.started_at - process.started_at) < 2


def ask_to_stop(processes: Iterable[RunProcess]) -> None:
    """Ask them to finish the step and save. Asked a second time, they end at once."""
    _signal(processes, signal.SIGINT)


def kill_processes(processes: Iterable[RunProcess]) -> None:
    _signal(processes, signal.SIGKILL)


def wait_until_ended(still_there: Callable[[], Iterable[RunProcess]], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(True for _ in still_there()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _signal(processes: Iterable[RunProcess], signum: signal.Signals) -> None:
    for process in processes:
        # Checked again: meanwhile it may have ended, and another process may have its pid.
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signum)


def _inspect(pid: int, wanted: Path | None = None) -> RunProcess | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        variables = process.environ()
        if RUN_MARK not in variables or process.status() == psutil.STATUS_ZOMBIE:
            return None
        run = Path(variables[RUN_MARK])
        if wanted not in (None, run) or not _may_belong(process, run):
            return None
        part, node = (printable_line(variables.get(name, ""), _MAX_NAME) for name in (PART_MARK, "SHOAL_NODE"))
        # A forked rank has room for a longer command than its own: the rest is empty.
        command = printable_line(shlex.join(filter(None, process.cmdline())), _MAX_COMMAND)
        result = RunProcess(pid, run, part, node, command, process.create_time())
        # All of the above was read from one process, and not from the next one with its pid.
        return result if process.is_running() else None
    return None


def _may_belong(process: psutil.Process, run: Path) -> bool:
    """Return whether the process runs as this user or as the folder's owner: any process can carry any run's mark.

    A set-user-ID program such as sudo runs as root with the environment of the user who started it.
    """
    owners = set(process.uids())
    if owners != {os.geteuid()} and owners != {run.stat().st_uid}:
        return False
    return sys.platform != "linux" or not is_setuid(process.pid)

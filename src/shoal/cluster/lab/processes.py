"""The processes of a lab, as /proc shows them: who holds it up, and who runs on which node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from shoal.control.processes import default_signals
from shoal.errors import LabError

_PROC = Path("/proc")
_DEADLINE_S = 10.0
_EXEC_S = 0.5
_EXITING = 0x4


def holders(folder: Path) -> list[int]:
    """Processes that shoal started to hold up the lab in this folder; they carry its name."""
    return [pid for pid in _pids() if _is_marked(_read(pid, "environ"), folder)]


def first_process(folder: Path, node: str) -> int | None:
    """The node's first process, when it lives. The file may be older than a reboot, so its word alone is not taken."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / f"{node}.pid").read_text(encoding="utf-8"))
        if _is_marked(_environment(pid), folder, node) and not is_dead(pid):
            return pid
    return None


def _is_marked(environment: bytes, folder: Path, node: str = "") -> bool:
    marks = {f"SHOAL_LAB={folder}".encode()} | ({f"SHOAL_NODE={node}".encode()} if node else set())
    return marks <= set(environment.split(b"\0"))


def _environment(pid: int) -> bytes:
    """Looked at again when it is empty: for a moment while a process becomes another program, it has none (seen)."""
    deadline = time.monotonic() + _EXEC_S
    while not (found := _read(pid, "environ")) and not is_dead(pid) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def running_in(first: int) -> list[tuple[int, str]]:
    """Number (on the host) and command of everything in a node but its first process."""
    with contextlib.suppress(OSError):
        namespace = _namespace(first)
        return [(pid, _command(pid)) for pid in _pids() if pid != first and _lives_in(pid, namespace)]
    return []


def end_all(folder: Path) -> None:
    """Again until none is left: one that was just being born when we looked is not on the first list (seen)."""
    await_end(lambda: _kill_each(pid for pid in holders(folder) if pid != os.getpid()))


def _kill_each(pids: Iterator[int]) -> list[int]:
    """Our own number is not among them: the watcher of an owned lab is one of its holders."""
    found = list(pids)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def end_node(first: int) -> None:
    """The kernel ends the others of a pid namespace with its first process; we wait until it has."""
    namespace = _namespace(first)
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    await_end(lambda: [pid for pid in _pids() if _lives_in(pid, namespace)])


def await_end(remaining: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while left := remaining():
        if time.monotonic() > deadline:
            raise LabError(
                f"processes of the lab do not end: {', '.join(f'{pid} ({_command(pid)})' for pid in left)}",
                why="the kernel has not finished with them; a stuck disk or network file system does that",
                fix="shoal lab down, in a while",
            )
        time.sleep(0.01)


def started(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def is_dead(pid: int) -> bool:
    """So is a zombie, and a process on its way out: the first one of a node stays until somebody has asked for the exit
    codes of all others, and where the machine's own first process is lazy that takes long (seen: 3 s)."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return len(fields) < 7 or fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)


def _lives_in(pid: int, namespace: str) -> bool:
    with contextlib.suppress(OSError):
        return _namespace(pid) == namespace and not is_dead(pid)
    return False


def _namespace(pid: int) -> str:
    return str((_PROC / str(pid) / "ns/pid").readlink())


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or "?"


def _read(pid: int, name: str) -> bytes:
    """Nothing when the process is gone, or not ours to look at."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


# SECTION cluster/lab/enter
# A process on a node, started and signalled from here.
#
# Between us and it stands its parent, see there.


# Both links of the chain from us to the program are tied: we to its parent, its parent to the program.
TIED = ("setpriv", "--pdeathsig", "KILL", "--")
_LISTEN_AND_HAND_OVER = (
    "import socket, sys\n"
    "with socket.create_server((sys.argv[1], 0)) as server, socket.socket(fileno=int(sys.argv[2])) as back:\n"
    "    socket.send_fds(back, [b'.'], [server.fileno()])"
)
_ENTER_DEADLINE_S = 20


class NodeProcess(subprocess.Popen[bytes]):
    """`returncode` is the inner process's: its parent ends as it did, by the same signal."""

    def send_signal(self, sig: int) -> None:
        """To the program, or, while there is none yet, to what is about to become its parent."""
        if self.poll() is None:
            for pid in self.inner() or [self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)

    def inner(self) -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children()]
        return []


def start_in_node(argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()) -> NodeProcess:
    """In a session of its own, and dead when we are; `argv` already holds the prefix that enters the node."""
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
                preexec_fn=default_signals,
            )
    except OSError as error:
        raise LabError(f"cannot start {argv[-1]} on a node: {error.strerror}", fix="check: ulimit -u; df -h") from error


def listening_program(address: str, hand_back: int) -> list[str]:
    """Runs on a node: listens at a free port and hands the socket back through a descriptor it inherits."""
    return [sys.executable, "-I", "-S", "-c", _LISTEN_AND_HAND_OVER, address, str(hand_back)]


def receive_listener(ours: socket.socket, theirs: socket.socket, argv: Sequence[str]) -> socket.socket:
    """A socket keeps the network it was made in, wherever it travels."""
    done = subprocess.run(argv, pass_fds=(theirs.fileno(),), capture_output=True, text=True, timeout=_ENTER_DEADLINE_S)
    if done.returncode:
        raise LabError("cannot listen on a node", why=done.stderr.strip(), fix="shoal lab status")
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptors[0])

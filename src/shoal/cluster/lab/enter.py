"""A process on a node, started and signalled from here.

Between us and it stands its parent, see there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from shoal.control.process import default_signals
from shoal.errors import LabError

# Both links of the chain from us to the program are tied: we to its parent, its parent to the program.
TIED = ("setpriv", "--pdeathsig", "KILL", "--")
_LISTEN_AND_HAND_OVER = (
    "import socket, sys\n"
    "with socket.create_server((sys.argv[1], 0)) as server, socket.socket(fileno=int(sys.argv[2])) as back:\n"
    "    socket.send_fds(back, [b'.'], [server.fileno()])"
)
_DEADLINE_S = 20


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
    done = subprocess.run(argv, pass_fds=(theirs.fileno(),), capture_output=True, text=True, timeout=_DEADLINE_S)
    if done.returncode:
        raise LabError("cannot listen on a node", why=done.stderr.strip(), fix="shoal lab status")
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptors[0])

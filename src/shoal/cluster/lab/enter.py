"""A process on a node, started and signalled from here.

Between us and it stands nsenter: a process cannot move itself into another pid namespace, only its child is born there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from shoal.errors import LabError

# Both links of the chain from us to the program are tied: we to nsenter, nsenter to the program.
TIED = ("setpriv", "--pdeathsig", "KILL", "--")


class NodeProcess(subprocess.Popen[bytes]):
    """`returncode` is the inner process's: nsenter ends as it did, by the same signal."""

    def send_signal(self, sig: int) -> None:
        """To the process on the node. nsenter itself would die of it and leave the other to be killed."""
        if self.poll() is None:
            for pid in self.inner():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)

    def kill(self) -> None:
        """The program, or, while there is none yet, whatever is about to become it."""
        if self.inner():
            self.send_signal(signal.SIGKILL)
        elif self.poll() is None:
            super().send_signal(signal.SIGKILL)

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
            )
    except OSError as error:
        raise LabError(f"cannot start {argv[-1]} on a node: {error.strerror}", fix="check: ulimit -u; df -h") from error

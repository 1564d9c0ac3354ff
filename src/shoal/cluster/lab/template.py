"""The template of a lab: one process imports torch for the ranks of all emulated nodes (`train/template.py`).

The command that starts a training starts it first of all, and passes its socket to the supervisor. Each node's agent
gets a socket to a template of its own, which is forked from this one and enters the node.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.cluster.node import start_process
from shoal.control.fork_request import LOAD_VARIABLES, TEMPLATE_FD, EnterRequest, send_request, template_command
from shoal.control.processes import TEMPLATE, make_marks
from shoal.control.rank_env import torch_caches
from shoal.errors import ShoalError


@contextlib.contextmanager
def starting_template(run: Path, env: Mapping[str, str]) -> Iterator[socket.socket | None]:
    """Start the template, with the variables that the ranks of all nodes share; yield its socket for the supervisor.

    It ends when both this process and the supervisor have closed that. None: ranks import torch themselves.
    """
    own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = None
    with own_end:
        with its_end, contextlib.suppress(OSError, ShoalError):
            variables = {**env, **torch_caches().variables, **LOAD_VARIABLES, **make_marks(run, TEMPLATE)}
            command = template_command(sys.executable, str(run), its_end.fileno())
            # The run folder does not exist yet.
            process = start_process(command, variables, Path(os.devnull), (its_end.fileno(),))
        try:
            yield own_end if process is not None else None
        finally:
            if process is not None:
                process.kill()
                process.wait()


class LabTemplate:
    """The supervisor's end."""

    def __init__(self, run: Path, sock: socket.socket) -> None:
        self._run = run
        self._socket = sock

    @classmethod
    def inherited(cls, run: Path) -> LabTemplate | None:
        """Return the template that the command has started; None if there is none."""
        fd = os.environ.pop(TEMPLATE_FD, None)
        return None if fd is None else cls(run, socket.socket(fileno=int(fd)))

    def serve_node(self, node: str, first: int, groups: Sequence[Path], log: Path) -> socket.socket | None:
        """Return the socket for the node's agent; None when the template has ended.

        `first` is the node's first process; messages of its template go to `log`.
        """
        for_agent, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        marks = {**make_marks(self._run, TEMPLATE), "SHOAL_NODE": node}
        request = EnterRequest(first, tuple(map(str, groups)), marks)
        log.parent.mkdir(parents=True, exist_ok=True)
        with its_end, contextlib.suppress(OSError), log.open("ab") as output:
            send_request(self._socket, request, (its_end.fileno(), output.fileno()))
            return for_agent
        for_agent.close()
        return None

    def release(self) -> None:
        """Let the template end once it has served all nodes."""
        self._socket.close()

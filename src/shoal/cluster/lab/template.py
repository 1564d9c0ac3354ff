"""The template of a lab: one process imports torch for the ranks of all emulated nodes (`train/template.py`).

Each node's agent gets a socket to a template of its own, which is forked from this one and enters the node.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.cluster.node import start_process
from shoal.control.fork_request import LOAD_VARIABLES, EnterRequest, send_request, template_command
from shoal.control.processes import TEMPLATE, make_marks
from shoal.control.rank_env import torch_caches
from shoal.errors import ShoalError
from shoal.run_folder import RunFolder


class LabTemplate:
    def __init__(self, run: Path, env: Mapping[str, str]) -> None:
        """Start it, with the variables that the ranks of all nodes share. Without it ranks only start later."""
        self._run = run
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        with its_end, contextlib.suppress(OSError, ShoalError):
            variables = {**env, **torch_caches().variables, **LOAD_VARIABLES, **make_marks(run, TEMPLATE)}
            command = template_command(sys.executable, str(run), its_end.fileno())
            log = RunFolder(run).agent_log(TEMPLATE)
            self._process = start_process(command, variables, log, (its_end.fileno(),))

    def serve_node(self, node: str, first: int, groups: Sequence[Path]) -> socket.socket | None:
        """Return the socket for the node's agent; None without a template. `first` is the node's first process."""
        if self._process is None:
            return None
        for_agent, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        marks = {**make_marks(self._run, TEMPLATE), "SHOAL_NODE": node}
        request = EnterRequest(first, tuple(map(str, groups)), marks)
        with its_end, contextlib.suppress(OSError):
            send_request(self._socket, request, (its_end.fileno(),))
            return for_agent
        for_agent.close()
        return None

    def release(self) -> None:
        """Let it end once it has served all nodes."""
        self._socket.close()

    def close(self) -> None:
        self.release()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

"""The state of a run, judged by its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shoal.control.processes import find_processes, has_supervisor, make_marks

# Starts an agent, prints its pid, and waits for the end of its own input.
PARENT = """
import os, subprocess, sys
marks = dict(os.environ, SHOAL_PART="agent")
agent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env=marks, stdin=sys.stdin)
print(agent.pid, flush=True)
agent.wait()
"""


def test_a_supervisor_of_another_version_is_recognised_by_its_agents(tmp_path: Path) -> None:
    variables = {**os.environ, **make_marks(tmp_path, "keeper")}
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    with subprocess.Popen(command, env=variables, text=True, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        agent_pid = int(parent.stdout.readline())
        processes = find_processes(tmp_path)
        assert {process.pid: process.part for process in processes} == {parent.pid: "keeper", agent_pid: "agent"}
        assert has_supervisor(processes)
        assert not has_supervisor([process for process in processes if process.part == "agent"])

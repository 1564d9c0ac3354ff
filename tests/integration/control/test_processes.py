"""The state of a run, judged by its processes.

Exercises control.processes.
"""

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


ASK = """
import pathlib, subprocess, sys
from shoal.control.processes import is_of_own_run, make_marks

for run in ("/runs/a", "/copies/of/node2/a", "/runs/b", None):
    variables = {} if run is None else make_marks(run, "rank-0")
    with subprocess.Popen(["sleep", "60"], env={"PATH": sys.argv[1], **variables}) as process:
        # The kernel shows no variables for a moment after the start.
        while not pathlib.Path(f"/proc/{process.pid}/environ").read_bytes():
            pass
        print(is_of_own_run(process.pid))
        process.kill()
"""


def test_ranks_of_another_run_are_other_programs() -> None:
    env = {**os.environ, **make_marks("/runs/a", "rank-1")}
    done = subprocess.run([sys.executable, "-c", ASK, os.environ["PATH"]], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "False", "False"], done.stderr

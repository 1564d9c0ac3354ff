"""A process that wrote a log is recognised by its marks and its start time.

Exercises launch.logs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from shoal.control.processes import RunProcess, is_alive
from tests.support.waiting import wait_until


def test_a_process_with_a_reused_pid_does_not_count_as_alive(tmp_path: Path) -> None:
    this_process = psutil.Process()
    described = RunProcess(os.getpid(), tmp_path, "rank-0", "local", "sleep", this_process.create_time())
    assert not is_alive(described), "a process without marks belongs to no run"
    child = psutil.Popen(["sleep", "60"], env={"SHOAL_RUN": str(tmp_path), "PATH": os.environ["PATH"]})
    try:
        alive = replace(described, pid=child.pid, started_at=child.create_time())
        # The kernel shows the variables of a new process a moment after exec.
        wait_until(lambda: is_alive(alive), 5)
        assert not is_alive(replace(alive, started_at=alive.started_at - 5))
    finally:
        child.kill()
        child.wait()

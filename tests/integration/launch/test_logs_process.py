"""Logs of several ranks read as one: in the order of writing, line by line, nothing lost: what starts processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from shoal.control.processes import RunProcess, is_alive


def test_a_process_with_the_number_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    me = psutil.Process()
    found = RunProcess(os.getpid(), tmp_path, "rank-0", "local", "sleep", me.create_time())
    assert not is_alive(found), "unmarked: nobody's run"
    child = psutil.Popen(["sleep", "60"], env={"SHOAL_RUN": str(tmp_path), "PATH": os.environ["PATH"]})
    try:
        alive = replace(found, pid=child.pid, started_at=child.create_time())
        assert is_alive(alive)
        assert not is_alive(replace(alive, started_at=alive.started_at - 5))
    finally:
        child.kill()
        child.wait()

"""`python -m tests.support.without_supervisor FOLDER`: a training whose supervisor was killed.

A separate program, because `--clean` ends all processes that it finds: it runs where it can see no processes of other
runs. Prints its results as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.control.processes import find_processes, find_supervisor
from tests.support.programs import TINY, set_flags, shoal_in_new_python, steps_of
from tests.support.waiting import wait_until


def run_scenario(folder: Path) -> dict[str, Any]:
    run = folder / "run"
    assert find_processes() == [], "processes of other runs are visible"
    output_of(
        shoal_in_new_python(
            "train", "--detach", "--out", run, "--steps", "1000000", *set_flags(*TINY, "train.compile=off")
        )
    )
    wait_until(lambda: (run / "commits.jsonl").exists(), within_s=60)
    supervisor = find_supervisor(run)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    steps = len(steps_of(run))
    wait_until(lambda: len(steps_of(run)) > steps + 5)
    pids = {process.part: process.pid for process in find_processes(run)}
    (state,) = json.loads(output_of(shoal_in_new_python("ps", "--json")))["runs"]
    resumed = shoal_in_new_python("train", "--resume", run)
    still_there = {process.part: process.pid for process in find_processes(run)}
    script = folder / "nothing.py"
    script.touch()
    warned = shoal_in_new_python("run", "--on", "local:1", "--out", folder / "first", script)
    cleaned = shoal_in_new_python("run", "--on", "local:1", "--clean", "--out", folder / "second", script)
    return {
        "pids": pids,
        "state": state["state"],
        "resumed": (resumed.returncode, resumed.stderr),
        "still_there": still_there,
        "warned": (warned.returncode, warned.stderr),
        "cleaned": (cleaned.returncode, cleaned.stderr),
        "left": [process.part for process in find_processes(run)],
        "ps": output_of(shoal_in_new_python("ps")),
    }


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_scenario(Path(sys.argv[1]))))

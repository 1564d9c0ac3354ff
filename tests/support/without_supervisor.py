"""`python -m tests.support.without_supervisor FOLDER`: a training whose supervisor was killed.

A program of its own, because `--clean` ends what it finds: it runs where it can find nobody else's processes. Prints
as JSON what it saw.
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
from tests.support.programs import TINY, set_flags, shoal, steps_of
from tests.support.runs import wait_until


def play(folder: Path) -> dict[str, Any]:
    run = folder / "run"
    assert find_processes() == [], "others can be seen from here"
    told(shoal("train", "--detach", "--out", run, "--steps", "1000000", *set_flags(*TINY, "train.compile=off")))
    wait_until(lambda: (run / "commits.jsonl").exists(), within_s=60)
    supervisor = find_supervisor(run)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    steps = len(steps_of(run))
    wait_until(lambda: len(steps_of(run)) > steps + 5)
    pids = {found.part: found.pid for found in find_processes(run)}
    (state,) = json.loads(told(shoal("ps", "--json")))["runs"]
    resumed = shoal("train", "--resume", run)
    still_there = {found.part: found.pid for found in find_processes(run)}
    script = folder / "nothing.py"
    script.touch()
    warned = shoal("run", "--on", "local:1", "--out", folder / "first", script)
    cleaned = shoal("run", "--on", "local:1", "--clean", "--out", folder / "second", script)
    return {
        "pids": pids,
        "state": state["state"],
        "resumed": (resumed.returncode, resumed.stderr),
        "still_there": still_there,
        "warned": (warned.returncode, warned.stderr),
        "cleaned": (cleaned.returncode, cleaned.stderr),
        "left": [found.part for found in find_processes(run)],
        "ps": told(shoal("ps")),
    }


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps(play(Path(sys.argv[1]))))

"""From the command to the first step, and where the time goes.

    .venv/bin/python benchmarks/first_step.py --on lab:3 --rounds 5

The times are those that the run folder itself has: what the supervisor, the agents and the ranks wrote down.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import options
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder

PARTS = ("command and run folder", "cluster and agents", "ranks meet: importing torch", "model, first step", "whole")


def main() -> None:
    parser = options(__doc__.split("\n")[0], rounds_=5, steps=3)
    parser.add_argument("--on", default="lab:3")
    given = parser.parse_args()
    found = [one_round(given.on, given.steps) for _ in range(given.rounds)]
    for name, values in zip(PARTS, zip(*found, strict=True), strict=True):
        print(f"{name:32} {statistics.median(values):6.2f} s   ({min(values):.2f} … {max(values):.2f})")


def one_round(on: str, steps: int) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        words = (sys.executable, "-m", "shoal", "train", "--on", on, "--global-batch", "12", "--out", str(run.path))
        typed = time.time()
        subprocess.run([*words, "--steps", str(steps)], check=True, capture_output=True)
        kept = _time(run.supervisor, "supervising")
        started = _time(run.supervisor, "running")
        met = max(_time(path, "start") for path in run.event_files().values())
        stepped = max(_time(path, "step") for path in run.event_files().values())
        return kept - typed, started - kept, met - started, stepped - met, stepped - typed


def _time(path: Path, kind: str) -> float:
    event: Event = next(event for event in read_events(path) if event["event"] == kind)
    return float(event["time"])


if __name__ == "__main__":
    main()

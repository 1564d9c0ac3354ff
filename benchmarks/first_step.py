"""From the command to the first step, from a killed rank to its return, and the memory of the ranks.

    .venv/bin/python benchmarks/first_step.py --on lab:3 --rounds 5 --kills 0
    .venv/bin/python benchmarks/first_step.py --on local:2 --rounds 0 --kills 10
    .venv/bin/python benchmarks/first_step.py --quick

The times are those that the run folder itself has: what the supervisor, the agents and the ranks wrote down. A rank
that was killed has returned with the first step that it completes; the model is not compiled. The memory is the
proportional set size of all ranks, and of the templates that they are forked from: a page that several processes share
is counted once.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _common import options, wait_until
from shoal.control.processes import find_processes
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder

PARTS = ("command and run folder", "cluster, agents, start of ranks", "ranks meet", "model, first step", "whole")
_DEADLINE_S = 120.0
_POLL_S = 0.05
_BETWEEN_S = 1.0


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=3, quick={"on": "local:2", "kills": 1}, trains=True)
    parser.add_argument("--on", default="lab:3")
    parser.add_argument("--kills", type=int, default=10, help="0: kill no rank")
    given = parser.parse_args()
    starts = [one_round(given.on, given.steps, given.sets) for _ in range(given.rounds)]
    for name, values in zip(PARTS, zip(*starts, strict=True), strict=False):
        show(name, values)
    if given.kills:
        returns, memory_mb = measure_returns(given.on, given.kills, given.sets)
        show("kill -9 of a rank to its return", returns)
        print(f"{'memory of all ranks':32} {memory_mb:6.0f} MB")


def show(name: str, values: Sequence[float]) -> None:
    print(f"{name:32} {statistics.median(values):6.2f} s   ({min(values):.2f} … {max(values):.2f})", flush=True)


def one_round(on: str, steps: int, sets: Sequence[str]) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        words = (sys.executable, "-m", "shoal", "train", "--on", on, "--global-batch", "12", "--out", str(run.path))
        typed = time.time()
        subprocess.run([*words, "--steps", str(steps), *_flags(sets)], check=True, capture_output=True)
        kept = _time(run.supervisor, "supervising")
        started = _time(run.supervisor, "running")
        met = max(_time(path, "start") for path in run.event_files().values())
        stepped = max(_time(path, "step") for path in run.event_files().values())
        return kept - typed, started - kept, met - started, stepped - met, stepped - typed


def measure_returns(on: str, kills: int, sets: Sequence[str]) -> tuple[list[float], float]:
    """Kill ranks; return the seconds of each return, and the memory of the ranks of a training before the first.

    A rank that is killed again soon is restarted later (docs/faults.md), so a training loses each of its ranks once.
    """
    returns: list[float] = []
    memory_mb = 0.0
    while len(returns) < kills:
        with _training(on, sets) as run:
            for rank in (ranks := sorted(run.event_files(), reverse=True)):
                _await_step(run, rank, time.time() + 1)
            memory_mb = memory_mb or sum(map(_proportional_mb, _pids(run, ("rank-", "template"))))
            for rank in ranks[: kills - len(returns)]:
                pids = _pids(run, (f"rank-{rank}",))
                killed = time.time()
                os.kill(min(pids), signal.SIGKILL)
                returns.append(_await_step(run, rank, killed) - killed)
                time.sleep(_BETWEEN_S)
    return returns, memory_mb


def _flags(sets: Sequence[str]) -> list[str]:
    return [word for setting in sets for word in ("--set", setting)]


@contextmanager
def _training(on: str, sets: Sequence[str]) -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        shoal = (sys.executable, "-m", "shoal")
        try:
            words = ("train", "--on", on, "--global-batch", "12", "--steps", "1000000", "--detach")
            flags = _flags(["train.compile=off", *(setting for setting in sets if "compile" not in setting)])
            subprocess.run([*shoal, *words, *flags, "--out", str(run.path)], check=True, capture_output=True)
            wait_until(lambda: _all_have_stepped(run), _DEADLINE_S, every_s=_POLL_S)
            yield run
        finally:
            subprocess.run([*shoal, "stop", "--now", str(run.path)], check=False, capture_output=True)


def _await_step(run: RunFolder, rank: int, after: float) -> float:
    """Return when the rank completed its first step after that moment."""
    wait_until(lambda: _last_step(run.events(rank)) > after, _DEADLINE_S, lambda: f"rank {rank}", _POLL_S)
    return min(
        float(event["time"])
        for event in read_events(run.events(rank))
        if event["event"] == "step" and event["time"] > after
    )


def _all_have_stepped(run: RunFolder) -> bool:
    files = run.event_files().values()
    return bool(files) and all(_last_step(path) for path in files)


def _last_step(path: Path) -> float:
    return max((float(event["time"]) for event in read_events(path) if event["event"] == "step"), default=0.0)


def _pids(run: RunFolder, parts: tuple[str, ...]) -> list[int]:
    return [process.pid for process in find_processes(run.path) if process.part.startswith(parts)]


def _proportional_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def _time(path: Path, kind: str) -> float:
    event: Event = next(event for event in read_events(path) if event["event"] == kind)
    return float(event["time"])


if __name__ == "__main__":
    main()

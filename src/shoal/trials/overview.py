"""The runs on this machine: which there are, what they do, and what is left of those that nobody keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.spec import On, parse_on
from shoal.config.load import load_config
from shoal.errors import ShoalError
from shoal.events import read_last_events
from shoal.launch.found import AGENT, Found, find, is_kept
from shoal.runfolder import RunFolder
from shoal.terminal import printable_json
from shoal.trials.keeper import read_job

_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RunState:
    """`state`: running; unkept, when its agents go on without a supervisor; left over, when only ranks or
    their children are there, which no process will ever end; or folder removed, when its processes are about to end
    because the run folder was deleted."""

    run: Path
    what: str
    on: str
    state: str
    step: int | None
    steps: int | None
    processes: tuple[Found, ...]

    @property
    def age_s(self) -> float:
        return max(found.age_s for found in self.processes)


def running_runs() -> list[RunState]:
    by_run: dict[Path, list[Found]] = {}
    for found in find():
        by_run.setdefault(found.run, []).append(found)
    return [describe(run, processes) for run, processes in sorted(by_run.items())]


def leftovers(states: Iterable[RunState]) -> list[Found]:
    return [found for state in states if state.state != "running" for found in state.processes]


def describe(path: Path, processes: list[Found]) -> RunState:
    run = RunFolder(path)
    parts = {found.part for found in processes}
    state = "running" if is_kept(processes) else "unkept" if AGENT in parts else "left over"
    if processes and run.is_removed():
        state = "folder removed"
    what, on, steps = _purpose(run)
    return RunState(path, what, on, state, _last_step(run), steps, tuple(processes))


def where(run: RunFolder) -> On | None:
    """The cluster of a run, if that can still be told."""
    _, on, _ = _purpose(run)
    with contextlib.suppress(ShoalError):
        return parse_on(on)
    return None


def _purpose(run: RunFolder) -> tuple[str, str, int | None]:
    """What it trains or runs, where, and for how many steps; as far as its folder still says so."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ShoalError):
        if run.config.is_file():
            config = load_config(run.config)
            return config.run.preset, config.run.on, config.train.steps
        job = read_job(run)
        word = job.script[1] if job.script[0] == "-m" else job.script[0]
        return Path(word).name, job.on, None
    return "", "", None


def _last_step(run: RunFolder) -> int | None:
    """From the end of rank 0's events; the file may be long."""
    with contextlib.suppress(OSError):
        events = read_last_events(run.events(0), _TAIL_BYTES)
        return next((int(event["step"]) for event in reversed(events) if event["event"] == "step"), None)
    return None


def as_json(states: list[RunState]) -> str:
    document = [
        {
            "run": str(state.run),
            "what": state.what,
            "on": state.on,
            "state": state.state,
            "step": state.step,
            "steps": state.steps,
            "age_s": round(state.age_s, 1),
            "processes": [
                {
                    "pid": found.pid,
                    "part": found.part,
                    "node": found.node,
                    "age_s": round(found.age_s, 1),
                    "command": found.command,
                }
                for found in state.processes
            ],
        }
        for state in states
    ]
    return printable_json({"runs": document}, indent=2)

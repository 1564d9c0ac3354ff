"""Ending a run from outside: it is asked first, and then exactly its own processes are ended."""

from __future__ import annotations

import contextlib
import json
from enum import Enum

from shoal.errors import RunFailed
from shoal.events import read_last_events
from shoal.launch.found import AGENT, KEEPER, Found, ask, await_end, end, find, is_alive
from shoal.runfolder import RunFolder

# A step of a large model on a slow machine, and the checkpoint after it, take their time.
ASK_S = 60.0
_END_S = 8.0
_LAST_BYTES = 1 << 16


class Outcome(Enum):
    """How a run came to its end, in the words of `shoal stop`."""

    NOT_RUNNING = "was not running"
    STOPPED = "finished its step and stopped"
    ENDED = "was ended"


def stop(run: RunFolder, wait_s: float | None = None) -> Outcome:
    """Asks the keeper, or the agents where there is none. `wait_s` None: as long as a step and a checkpoint may take,
    or as the ranks of a script were given to end."""
    if not find(run.path):
        return Outcome.NOT_RUNNING
    if wait_s is None:
        wait_s = max(ASK_S, grace_of(run) + _END_S)
    ask(_heads(run))
    if wait_s and await_end(lambda: find(run.path), wait_s):
        is_script = not run.config.is_file()
        return Outcome.ENDED if is_script and _had_to_be_killed(run) else Outcome.STOPPED
    ask(_heads(run))
    if not await_end(lambda: find(run.path), _END_S):
        end_processes(find(run.path))
    return Outcome.ENDED


def grace_of(run: RunFolder) -> float:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        job = json.loads(run.job.read_bytes())
        return float(job["grace_s"]) if job["script"] else 0.0
    return 0.0


def end_processes(processes: list[Found]) -> None:
    end(processes)
    if not await_end(lambda: filter(is_alive, processes), _END_S):
        left = ", ".join(f"{found.pid} ({found.command})" for found in processes if is_alive(found))
        raise RunFailed(f"processes do not end: {left}", why="the kernel has not finished with them")


def _had_to_be_killed(run: RunFolder) -> bool:
    """Whether an agent killed ranks of a script's last launch, because they did not stop in time."""
    for journal in run.path.glob("agents/*.jsonl"):
        events = read_last_events(journal, _LAST_BYTES)
        launch = events[-1].get("launch") if events else None
        if any(each["event"] == "ended" and each["by_us"] and each.get("launch") == launch for each in events):
            return True
    return False


def _heads(run: RunFolder) -> list[Found]:
    found = find(run.path)
    for part in (KEEPER, AGENT):
        if heads := [each for each in found if each.part == part]:
            return heads
    return found

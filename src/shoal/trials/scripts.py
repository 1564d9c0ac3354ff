"""Anybody's script from its start to its end: what `shoal run` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.cluster.spec import settled
from shoal.events import Event
from shoal.launch.logs import LogFollower, LogLine
from shoal.runfolder import RunFolder
from shoal.trials.following import Keeping, await_running, follow, kept
from shoal.trials.keeper import Job, start_keeper

ShowLine = Callable[[LogLine], None]
ShowNote = Callable[[str], None]


def run_anything(job: Job, out: Path, detach: bool, show: ShowLine, show_note: ShowNote) -> RunFolder:
    """Raises with the script's own exit code."""
    job = replace(job, on=settled(job.on))
    run = RunFolder.create(out)
    keeping = Keeping.from_now(run)
    logs = LogFollower(run)

    def look(notes: list[Event]) -> None:
        for note in notes:
            show_note(note["text"])
        for line in [] if detach else logs.poll():
            show(line)

    with contextlib.ExitStack() as held:
        lock = held.enter_context(run.held())
        with kept(lambda: start_keeper(run, job, lock)) as keeper:
            held.close()
            if detach:
                await_running(keeper, keeping, look)
                return run
            try:
                follow(run, keeper, keeping, look)
            finally:
                for line in logs.last_words():
                    show(line)
    return run

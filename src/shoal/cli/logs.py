"""`shoal logs`: what the ranks of a run printed, as one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.lines import LineDisplay
from shoal.cli.output import make_console
from shoal.errors import UsageError
from shoal.events import EventTail
from shoal.launch.found import find
from shoal.launch.logs import LogFollower
from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Of this rank only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """What the ranks printed, stderr included: merged in order, line by line, coloured by rank.

    While it follows, notes about the run itself go to stderr: who left, who came, what was done.
    """
    folder = RunFolder.find(run)
    display = LineDisplay(make_console(soft_wrap=True))
    follower, keeper = LogFollower(folder, rank, shows_current=display.is_live), EventTail(folder.keeper)
    keeper.skip_to_end()
    count = 0
    with contextlib.closing(display):
        while True:
            over = not follow or not find(folder.path)
            lines = follower.poll()
            count += len(lines)
            display.lines(lines, follower.current() if follow else ())
            for event in keeper.poll() if follow else ():
                if event["event"] == "note":
                    display.note(event["text"])
            if over:
                break
            time.sleep(0.2)
        lines = follower.last_words()
        count += len(lines)
        display.lines(lines)
    if folder.is_removed():
        raise folder.removed()
    if not count and rank is not None:
        there = ", ".join(path.name for path in sorted(folder.path.glob("logs/*/*.log")))
        raise UsageError(
            f"rank {rank} of {run} has printed nothing",
            why=f"logs there are: {there or 'none'}",
            fix=f"shoal logs {run}",
        )

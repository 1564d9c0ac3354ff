"""`shoal logs`: what the ranks of a run printed, as one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.lines import LineDisplay, print_note
from shoal.cli.output import make_console
from shoal.cli.progress import make_plain_display
from shoal.config.load import load_config
from shoal.errors import UsageError
from shoal.launch.found import find
from shoal.launch.logs import LogFollower
from shoal.runfolder import RunFolder
from shoal.trials.attaching import opening
from shoal.trials.following import Keeping, RunNews

app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Of this rank only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """What the ranks printed, stderr included: merged in order, line by line, coloured by rank.

    While it follows, what happens goes to stderr: of a training its steps, losses and warnings, as shoal train shows
    them (not with --rank), and of any run who left, who came and how it ended.
    """
    folder = RunFolder.find(run)
    display = LineDisplay(make_console(soft_wrap=True))
    follower = LogFollower(folder, rank, shows_current=display.is_live)
    happenings = Happenings(folder, display, with_progress=rank is None) if follow else None
    count = 0
    with contextlib.closing(display):
        while True:
            over = not follow or not find(folder.path)
            lines = follower.poll()
            count += len(lines)
            display.lines(lines, follower.current() if follow else ())
            if happenings is not None:
                happenings.show()
            if over:
                break
            time.sleep(0.2)
        lines = follower.last_words()
        count += len(lines)
        display.lines(lines)
    if happenings is not None:
        happenings.show_end()
    if folder.is_removed():
        raise folder.removed()
    if not count and rank is not None:
        there = ", ".join(path.name for path in sorted(folder.path.glob("logs/*/*.log")))
        raise UsageError(
            f"rank {rank} of {run} has printed nothing",
            why=f"logs there are: {there or 'none'}",
            fix=f"shoal logs {run}",
        )


class Happenings:
    """Prints on stderr what happens to a run: the keeper's notes, and of a training what its ranks' events say."""

    def __init__(self, run: RunFolder, lines: LineDisplay, with_progress: bool) -> None:
        self._keeping = Keeping.from_now(run)
        self._news = RunNews(run)
        self._lines = lines
        self._display = None
        if with_progress and run.config.is_file():
            self._display = make_plain_display(load_config(run.config))
            # Each rank prints its own part of the data.
            self._display([event for event in opening(run) if event["event"] != "shard"])

    def show(self) -> None:
        notes, progress = self._keeping.poll(), self._display
        if progress is None:
            for note in notes:
                self._lines.note(note["text"])
            return
        happened = [*notes, *(event for event in self._news.poll() if event["event"] != "shard")]
        if happened:
            self._lines.beside(lambda: progress(happened))

    def show_end(self) -> None:
        """How the run ended, where that was while we followed."""
        self.show()
        if self._keeping.ended is not None:
            failed = self._keeping.ended["code"]
            print_note(f"the run has ended: {self._keeping.ended.get('seen')}" if failed else "the run has ended well")

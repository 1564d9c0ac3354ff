"""`shoal join`: take part in a run that another machine hosts, without SSH; or again, after our agent died."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.lines import print_note
from shoal.cli.output import shown
from shoal.cli.progress import make_display
from shoal.cluster.join.invitation import parse_invitation
from shoal.config.load import load_config
from shoal.events import EventTail
from shoal.runfolder import RunFolder
from shoal.trials.joining import join as take_part
from shoal.trials.rejoining import rejoin
from shoal.trials.training import Display, default_out

app = typer.Typer(add_completion=False)


@app.command()
def join(
    invitation: Annotated[
        str, typer.Argument(help="ADDRESS:PORT#CODE, as shoal host printed it; or the folder of a run to come back to.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="This machine's run folder.", show_default="runs/joined-TIME")
    ] = None,
    node: Annotated[str | None, typer.Option(help="With a run folder: which node, where it has several.")] = None,
) -> None:
    """Take part in a run that another machine hosts: type there `shoal host`, and here the line that it prints.

    A machine whose agent was killed comes back to a run that goes on elsewhere: shoal join RUN-FOLDER.
    """
    if Path(invitation).is_dir():
        sys.stdout.write(f"{rejoin(Path(invitation), node)}\n")
        return
    show = OwnRank()
    try:
        joined = take_part(parse_invitation(invitation), out or default_out("joined"), print_note, show)
    finally:
        show.close()
    sys.stdout.write(f"the run has ended; its results are on the host, our part is in {shown(joined.run.path)}\n")


class OwnRank:
    """Progress of the rank on this machine, as a host shows that of rank 0."""

    def __init__(self) -> None:
        self._display: Display | None = None
        self._tail: EventTail | None = None
        self._gone = False

    def __call__(self, run: RunFolder) -> None:
        try:
            self._show(run)
        except OSError:
            # The terminal is gone; our part of the run is not.
            self._gone = True

    def _show(self, run: RunFolder) -> None:
        if self._gone:
            return
        if self._tail is None and (files := run.event_files()):
            self._tail = EventTail(next(iter(files.values())))
            self._display = make_display(load_config(run.config))
        if self._tail is not None and self._display is not None:
            self._display([{**event, "rank": 0} for event in self._tail.poll()])

    def close(self) -> None:
        if self._display is not None:
            with contextlib.suppress(OSError):
                self._display.close()

"""`shoal report`: one self-contained HTML page about a run, alive, finished or dead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import print_json, shown
from shoal.report.page import write_report
from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.", readable=False)],
    out: Annotated[Path | None, typer.Option(help="The folder to write it into.", show_default="the run's")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON on stdout.")] = False,
) -> None:
    """One self-contained HTML page about a run: loss, where each step's time went, scaling, manifest."""
    page = write_report(RunFolder.open(run), out=out)
    if json:
        print_json({"report": str(page)})
    else:
        typer.echo(shown(page))

"""`shoal attach`: watch a run that goes on without a terminal, from wherever it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.lines import LineDisplay
from shoal.cli.output import command, make_console, print_json, print_run, shown
from shoal.cli.progress import make_display
from shoal.errors import UsageError
from shoal.runfolder import RunFolder
from shoal.trials.attaching import attach_script, attach_training
from shoal.trials.training import the_manifest

app = typer.Typer(add_completion=False)


@app.command()
def attach(
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")] = False,
) -> None:
    """Watch a run as if it had been started here, to the same end. Ctrl-C leaves it running; shoal stop ends it."""
    folder = RunFolder.find(run)
    try:
        if not folder.config.is_file():
            if json:
                raise UsageError(
                    "--json does not go with the run of a script",
                    why="it prints the manifest of a training, and a script has none",
                    fix=f"leave it out: shoal attach {run}",
                )
            attach_script(folder, LineDisplay(make_console(soft_wrap=True)))
            return
        attach_training(folder, make_display)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nthe run goes on; to end it: {command('stop', shown(folder.path))}\n")
        return
    manifest = the_manifest(folder)
    if json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_run(folder, manifest)

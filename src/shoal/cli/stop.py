"""`shoal stop`: end a run in good order."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.given import is_given
from shoal.cli.output import command, print_json, shown
from shoal.cluster.hosts.spec import HostsSpec
from shoal.errors import UsageError
from shoal.launch.found import find
from shoal.runfolder import RunFolder, user_name
from shoal.trials.elsewhere import stop_on
from shoal.trials.overview import where
from shoal.trials.stopping import ASK_S, Outcome
from shoal.trials.stopping import stop as stop_run

app = typer.Typer(add_completion=False)

_FINALITY = ("not_running", "stopped", "ended")


@app.command()
def stop(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    now: Annotated[bool, typer.Option("--now", help="Don't wait for the step and the checkpoint.")] = False,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            help="Seconds it may take to stop by itself.",
            show_default=f"{ASK_S:.0f}, or more for a script with a longer --grace",
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", hidden=True, help="On this machine only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Ask a run to finish its step and save; end exactly its own processes if it doesn't."""
    if now and is_given(context, "wait_s"):
        raise UsageError("--wait has no effect with --now", why="--now waits for nothing", fix="leave one of them out")
    folder = RunFolder(run.resolve()) if find(run.resolve()) else RunFolder.find(run)
    outcome = stop_run(folder, 0.0 if now else wait_s)
    if not here and outcome is Outcome.NOT_RUNNING and isinstance(hosts := where(folder), HostsSpec):
        # Nobody keeps it here, but its agents may well go on there.
        outcome = Outcome[max(stop_on(hosts, folder, now).values(), key=_FINALITY.index).upper()]
    if outcome is Outcome.NOT_RUNNING and folder.path.stat().st_uid != os.geteuid() and folder.is_held():
        owner = user_name(folder.path.stat().st_uid)
        raise UsageError(
            f"{shown(folder.path)} is running, and user {user_name(os.geteuid())} cannot stop it",
            why=f"it belongs to user {owner}",
            fix=f"ask {owner}, or: sudo -u {owner} shoal stop {shlex.quote(str(folder.path))}",
        )
    if json:
        print_json({"run": str(folder.path), "outcome": outcome.name.lower()})
        return
    sys.stdout.write(f"{shown(folder.path)} {_words(outcome, folder)}\n")
    if not folder.keeper.exists() and outcome is not Outcome.NOT_RUNNING:
        sys.stdout.write("its run folder was removed while the run was writing to it: nothing is saved\n")
        return
    if outcome is not Outcome.NOT_RUNNING and folder.checkpoints.is_dir():
        sys.stdout.write(f"next: {command('train', '--resume', shown(folder.path))}\n")


def _words(outcome: Outcome, run: RunFolder) -> str:
    """Of a script nothing is known but that its ranks ended by themselves; only a training has a configuration."""
    is_script = run.job.is_file() and not run.config.is_file()
    return "stopped when it was asked to" if is_script and outcome is Outcome.STOPPED else outcome.value

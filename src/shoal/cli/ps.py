"""`shoal ps`: the runs that go on, with or without a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.lines import process_lines
from shoal.cli.output import print_json, shown, stdout_console
from shoal.cluster.hosts.spec import read_hosts
from shoal.errors import ShoalError
from shoal.trials.elsewhere import runs_on
from shoal.trials.overview import RunState, as_json, running_runs
from shoal.units import format_duration

app = typer.Typer(add_completion=False)

_WIDE = 1000


@app.command()
def ps(
    on: Annotated[
        Path | None, typer.Option(help="A hosts file: the runs on those machines.", show_default="here")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Every process, with its command.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Which runs are going on, where their ranks are, and what earlier ones left behind."""
    if on is not None:
        print_elsewhere(runs_on(read_hosts(on)), json)
        return
    states = running_runs()
    if json:
        sys.stdout.write(as_json(states) + "\n")
    elif not states:
        sys.stdout.write("no run is going on here\n")
    else:
        print_runs(states)
        if all_:
            print_processes(states)


def print_runs(states: list[RunState]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "what", "on", "state", "step", "for", "processes"):
        table.add_column(title, overflow="fold")
    for state in states:
        step = "–" if state.step is None else f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")
        age, count = format_duration(state.age_s), str(len(state.processes))
        texts = (shown(state.run), state.what, state.on, state.state, step, age, count)
        table.add_row(*map(escape, texts))
    console = stdout_console()
    if not console.is_terminal:
        # A folder's name is one word for whoever reads the pipe.
        console.width = _WIDE
    console.print(table)


def print_elsewhere(found: dict[str, list[dict[str, Any]] | ShoalError], json: bool) -> None:
    """A host that cannot be asked is said so, beside what the others answered."""
    if json:
        print_json({"hosts": {name: _or_error(said) for name, said in found.items()}})
        return
    for name, runs in found.items():
        if isinstance(runs, ShoalError):
            sys.stdout.write(f"{name}: {runs.seen}\n")
            continue
        sys.stdout.write(f"{name}: {'no run' if not runs else ''}\n")
        for run in runs:
            step = "–" if run["step"] is None else f"step {run['step']}"
            sys.stdout.write(f"  {run['run']}  {run['state']}  {step}  for {format_duration(run['age_s'])}\n")
            for process in run["processes"]:
                sys.stdout.write(f"    {process['pid']:>8}  {process['part']:<8}  {process['command']}\n")


def _or_error(said: list[dict[str, Any]] | ShoalError) -> Any:
    return said.as_dict() if isinstance(said, ShoalError) else said


def print_processes(states: list[RunState]) -> None:
    """Not a table: a command is long, and cut short it is of no use."""
    for state in states:
        sys.stdout.write(f"\n{shown(state.run)}\n")
        for line in process_lines(state.processes):
            sys.stdout.write(f"  {line}\n")

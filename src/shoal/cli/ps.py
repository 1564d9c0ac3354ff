"""`shoal ps`: the runs that go on, with or without a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.table import Table

from shoal.cli.lines import process_lines
from shoal.cli.output import shown, stdout_console
from shoal.trials.overview import RunState, as_json, running_runs
from shoal.units import format_duration

app = typer.Typer(add_completion=False)

_WIDE = 1000


@app.command()
def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Every process, with its command.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Which runs are going on here, where their ranks are, and what earlier ones left behind."""
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
        table.add_row(shown(state.run), state.what, state.on, state.state, step, age, count)
    console = stdout_console()
    if not console.is_terminal:
        # A folder's name is one word for whoever reads the pipe.
        console.width = _WIDE
    console.print(table)


def print_processes(states: list[RunState]) -> None:
    """Not a table: a command is long, and cut short it is of no use."""
    for state in states:
        sys.stdout.write(f"\n{shown(state.run)}\n")
        for line in process_lines(state.processes):
            sys.stdout.write(f"  {line}\n")

"""`shoal demo`: the main job, from nothing to a report, in under two minutes on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from shoal.cli.bench import scaling_document, settings_of
from shoal.cli.output import command, make_console, print_json, print_scaling, run_rows, shown, stdout_console
from shoal.cli.progress import make_display
from shoal.trials.scaling import ScalingResult, measure_scaling
from shoal.trials.training import default_out

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=4, help="Steps of each training.")] = 100,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/demo-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """The main job: one rank, then two, trained, measured, verified and explained."""
    # By gloo, so that there is an exchange to see: ranks of one machine would do without one, through shared memory.
    flags: dict[str, dict[str, Any]] = {"train": {"steps": steps}, "sync": {"inside": "gloo"}}
    config = settings_of(context, "grammar", flags, set_ or [])
    make_console(stderr=True).print(
        "A small GPT learns English verb forms, first on one rank, then on two that exchange gradients in every step."
    )
    result = measure_scaling(config, [1, 2], out or default_out("demo"), make_display)
    if json:
        print_json({**scaling_document(result), "manifest": result.manifest.model_dump(mode="json")})
    else:
        _print(result)


def _print(result: ScalingResult) -> None:
    console = stdout_console()
    console.print()
    print_scaling(result.points)
    console.print("\n[bold]two ranks[/]")
    for name, value in run_rows(result.manifest):
        console.print(f"  {name:12} {escape(value)}", soft_wrap=True)
    two_ranks = result.runs[2]
    typer.echo(
        f"\nmanifest: {shown(two_ranks.manifest)}\npicture:  {shown(result.picture)}\n"
        f"report:   {shown(result.report)}\nnext:     {command('sample', shown(two_ranks.path))}"
    )

"""`shoal bench`: measured tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.given import given_settings
from shoal.cli.output import print_json, print_scaling, shown
from shoal.cli.progress import make_display
from shoal.config.load import build_config, refuse_twice, refuse_without_effect, typed_settings
from shoal.config.presets import Overrides
from shoal.config.schema import Config
from shoal.errors import UsageError
from shoal.report.explain_scaling import explain, is_plausible, warn_of_load
from shoal.report.scaling import efficiency
from shoal.trials.scaling import ScalingResult, measure_scaling
from shoal.trials.training import default_out

# In one place with the command: what measures them imports numpy, and `--help` should not wait for that.
DEFAULT_LEVERS = "stock,ddp,fp16,bf16,int8,powersgd:4,accumulate:4,local,diloco,streaming"

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measured tables and plots."""


@app.command()
def scaling(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="What to train.")] = "grammar",
    ranks: Annotated[str, typer.Option(help="Rank counts to measure.")] = "1,2,4",
    steps: Annotated[int, typer.Option(min=4, help="Steps a run; the second half is measured.")] = 60,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median round counts.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/scaling-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Tokens per second on 1, 2, 4 … ranks, and why the curve bends."""
    config = settings_of(context, preset, {"train": {"steps": steps}}, set_ or [])
    result = measure_scaling(config, parse_ranks(ranks), out or default_out("scaling"), make_display, repeat)
    if json:
        print_json(scaling_document(result))
        return
    print_scaling(result.points)
    typer.echo(f"\npicture: {shown(result.picture)}\nreport:  {shown(result.report)}")


@app.command()
def levers(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="What to train.")] = "grammar",
    on: Annotated[str, typer.Option(help="Where: local:2, lab:2,link=100mbit, or a file of hosts.")] = "local:2",
    levers: Annotated[
        str, typer.Option(help="What to compare, each WAY[:NUMBER][+WIRE]: stock,ddp,int8,accumulate:4+fp16,diloco:50.")
    ] = DEFAULT_LEVERS,
    steps: Annotated[int, typer.Option(min=4, help="Steps a run; the second half is measured.")] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median round counts.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/levers-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Every way to exchange, on one model and cluster: speed, bytes, and what it costs in loss.

    Beside them run one node alone and, as the ceiling, all nodes without any exchange.
    """
    from shoal.cli.leverstext import levers_document, print_levers
    from shoal.trials.levers import measure_levers

    flags: dict[str, dict[str, Any]] = {"train": {"steps": steps, "eval_every": max(1, steps // 10)}, "run": {"on": on}}
    sets = set_ or []
    refuse_twice(given_settings(context, {"steps": "train.steps", "on": "run.on"}), sets)
    config = build_config(preset, flags=flags, sets=sets)
    result = measure_levers(config, levers, out or default_out("levers"), make_display, repeat)
    if json:
        print_json(levers_document(result))
        return
    print_levers(result.table)
    typer.echo(f"\npicture: {shown(result.picture)}\nfigures: {shown(result.figures)}")


def settings_of(context: typer.Context, preset: str, flags: Overrides, sets: list[str]) -> Config:
    """The settings of a comparison of rank counts; what it would ignore is refused."""
    refuse_twice(given_settings(context, {"steps": "train.steps"}), sets)
    if "run.on" in typed_settings(None, sets):
        raise UsageError(
            f"--set run.on has no effect on {context.command_path}",
            why="it compares numbers of ranks on this machine, local:1, local:2 and so on",
            fix="leave it out; another cluster is measured by: shoal bench levers --on lab:3",
        )
    config = build_config(preset, flags=flags, sets=sets)
    refuse_without_effect(config, typed_settings(None, sets))
    return config


def parse_ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {text!r} is not a list of numbers", fix="write for example: --ranks 1,2,4") from None


def scaling_document(result: ScalingResult) -> dict[str, object]:
    base = result.points[0]
    rows = [
        {
            "ranks": point.ranks,
            "threads": point.threads,
            "tokens_per_s": point.tokens_per_s,
            "speedup": point.tokens_per_s / base.tokens_per_s,
            "efficiency": efficiency(point, base),
            "step_s": point.step_s,
            "allreduce_ms": None if point.allreduce_s is None else 1e3 * point.allreduce_s,
            "phases": point.phases,
            "other_programs_cores": point.other_load,
            "plausible": is_plausible(point, base),
        }
        for point in result.points
    ]
    return {
        "rows": rows,
        "explanation": explain(result.points),
        "warning": warn_of_load(result.points) or None,
        "picture": str(result.picture),
        "report": str(result.report),
        "runs": {str(count): str(run.path) for count, run in result.runs.items()},
    }

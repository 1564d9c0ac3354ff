"""`shoal bench`: measure the speed of several settings and compare them in a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shoal.cli.output import given_settings, print_json, print_scaling, shown, stdout_console
from shoal.config.presets import Overrides
from shoal.config.sync_choice import OUTER_METHODS, WIRE_FORMATS, WireChoice
from shoal.errors import UsageError
from shoal.run_folder import default_out
from shoal.units import format_count, format_duration, format_share, format_si, join_words, warn_of_other_programs

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.tools.bench.levers import LeverRow, LeversResult, LeverTable
    from shoal.tools.bench.scaling import ScalingResult


_TITLES = ("lever", "tokens/s", "×node", "×stock", "×top", "sent", "exposed", "loss", "timed")
_NEAR_CEILING = 0.95
# Defined here because shoal.tools.bench.levers imports numpy, and `--help` should not wait for that.
_WIRES = (str(WireChoice(name)) for name in WIRE_FORMATS if name != "fp32")
DEFAULT_LEVERS = ",".join(("stock", "ddp", *_WIRES, "accumulate:4", *OUTER_METHODS))

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed: by number of ranks, or by sync method."""


@app.command()
def scaling(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="What to train.")] = "grammar",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to measure.")] = "1,2,4",
    steps: Annotated[int, typer.Option(min=4, help="Steps of each run; the second half is measured.")] = 60,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the median one counts.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/scaling-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Measure tokens per second on 1, 2, 4 … ranks, and explain what limits the speed-up."""
    from shoal.cli.progress import make_display
    from shoal.tools.bench.scaling import measure_scaling

    config = scaling_config(context, preset, {"train": {"steps": steps}}, set_ or [])
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
    on: Annotated[str, typer.Option(help="Where: local:2, lab:2,link=100mbit, or a hosts file.")] = "local:2",
    levers: Annotated[
        str,
        typer.Option(
            help="Sync methods to compare, each METHOD[:NUMBER][+FORMAT]: stock,ddp,int8,accumulate:4+fp16,diloco:50."
        ),
    ] = DEFAULT_LEVERS,
    steps: Annotated[int, typer.Option(min=4, help="Steps of each run; the second half is measured.")] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the median one counts.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/levers-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Compare sync methods ("levers") on one model and cluster: speed, bytes sent, loss.

    A lever is one way to exchange gradients or weights between ranks: DDP, a smaller number format, fewer exchanges.
    For comparison, one node alone and, as the upper limit, all nodes without any exchange are measured too.
    """
    from shoal.cli.progress import make_display
    from shoal.config.load import build_config, refuse_duplicate_settings
    from shoal.tools.bench.levers import measure_levers

    flags: dict[str, dict[str, Any]] = {"train": {"steps": steps, "eval_every": max(1, steps // 10)}, "run": {"on": on}}
    sets = set_ or []
    refuse_duplicate_settings(given_settings(context, {"steps": "train.steps", "on": "run.on"}), sets)
    config = build_config(preset, flags=flags, sets=sets)
    result = measure_levers(config, levers, out or default_out("levers"), make_display, repeat)
    if json:
        print_json(levers_document(result))
        return
    print_levers(result.table)
    typer.echo(f"\npicture: {shown(result.picture)}\nfigures: {shown(result.figures)}")


def scaling_config(context: typer.Context, preset: str, flags: Overrides, sets: list[str]) -> Config:
    """Build the settings of a comparison of rank counts. Refuse settings that it would ignore."""
    from shoal.config.load import build_config, refuse_duplicate_settings, refuse_without_effect, typed_settings

    refuse_duplicate_settings(given_settings(context, {"steps": "train.steps"}), sets)
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
    from shoal.tools.report.explain_run import explain_scaling, is_plausible, warn_of_load
    from shoal.tools.report.figures import efficiency

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
        "explanation": explain_scaling(result.points),
        "warning": warn_of_load(result.points) or None,
        "picture": str(result.picture),
        "report": str(result.report),
        "runs": {str(count): str(run.path) for count, run in result.runs.items()},
    }


def print_levers(table: LeverTable) -> None:
    console = stdout_console()
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(_TITLES):
        grid.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*_cells(row))
    console.print(grid)
    for line in explain_levers(table):
        console.print(line, highlight=False, soft_wrap=True)


def explain_levers(table: LeverTable) -> list[str]:
    """Explain the columns and what stands out."""
    lines = [
        "\n×node, ×stock, ×top: against one node, stock DDP, and all nodes without any exchange. sent: bytes of a step."
    ]
    if table.tokens is not None and table.seconds is not None:
        lines.append(
            f"loss: validation loss after {format_count(table.tokens)} tokens. timed: validation loss after "
            f"{format_duration(table.seconds)} of steps, when the first run had reached these tokens."
        )
    rated = [row for row in table.rows if row.of_ceiling is not None and row.point.evaluations]
    near = [row.point.name for row in rated if (row.of_ceiling or 0) >= _NEAR_CEILING and not row.is_above_ceiling]
    if near:
        lines.append(f"{join_words(near)}: within 5% of what these nodes compute without any exchange.")
    above = [row for row in table.rows if row.is_above_ceiling]
    if fewer := [row.point.name for row in above if row.is_plausible]:
        lines.append(
            f"{join_words(fewer)}: faster than no exchange, because larger batches update the weights less often."
        )
    if wrong := [f"{row.point.name} ({row.of_ceiling:.2f}×)" for row in above if not row.is_plausible]:
        lines.append(
            f"! {join_words(wrong)}: not plausible. An exchange takes time, so the run without any was slowed down by "
            "something. Measure again with --repeat 3."
        )
    slower = [row.point.name for row in rated if row.of_one_node is not None and row.of_one_node < 1]
    if slower:
        lines.append(f"{join_words(slower)}: slower than one node alone.")
    best = min(
        (row for row in table.rows if row.loss_at_time is not None),
        key=lambda row: row.loss_at_time or 0.0,
        default=None,
    )
    if best is not None:
        late = [row.point.name for row in table.rows if row.point.evaluations and row.loss_at_time is None]
        others = f" (not compared, since not evaluated by then: {join_words(late)})" if late else ""
        lines.append(f"Most learned in the same time: {best.point.name}{others}.")
    return [*lines, *([warning] if (warning := _warn_of_lever_load(table)) else [])]


def _warn_of_lever_load(table: LeverTable) -> str:
    return warn_of_other_programs({f"with {row.point.name}": row.point.other_load for row in table.rows})


def levers_document(result: LeversResult) -> dict[str, object]:
    return {
        "rows": [_row_document(row) for row in result.table.rows],
        "compared_at": {"tokens": result.table.tokens, "seconds": result.table.seconds},
        "explanation": " ".join(line.strip() for line in explain_levers(result.table)),
        "warning": _warn_of_lever_load(result.table) or None,
        "picture": str(result.picture),
        "runs": {name: str(run.path) for name, run in result.runs.items()},
    }


def _row_document(row: LeverRow) -> dict[str, object]:
    point = row.point
    return {
        "lever": point.name,
        "nodes": point.nodes,
        "tokens_per_s": point.tokens_per_s,
        "of_one_node": row.of_one_node,
        "of_stock": row.of_stock,
        "of_ceiling": row.of_ceiling,
        "plausible": row.is_plausible,
        "other_programs_cores": point.other_load,
        "step_s": point.step_s,
        "exposed_s": point.exposed_s,
        "wait_s": point.wait_s,
        "wire_bytes_per_step": point.wire_bytes,
        "theoretical_bytes_per_step": point.theory_bytes,
        "peak_memory_bytes": point.peak_memory_bytes,
        "val_loss_at_equal_tokens": row.loss_at_tokens,
        "val_loss_at_equal_time": row.loss_at_time,
    }


def _cells(row: LeverRow) -> tuple[str, ...]:
    point = row.point
    return (
        point.name,
        f"{point.tokens_per_s:,.0f}",
        *(_times(ratio) for ratio in (row.of_one_node, row.of_stock)),
        _times(row.of_ceiling) + ("" if row.is_plausible else "!"),
        "–" if point.wire_bytes is None or point.nodes == 1 else format_si(point.wire_bytes, "B"),
        format_share(point.exposed_s, point.step_s) if point.nodes > 1 else "–",
        *("–" if loss is None else f"{loss:.4f}" for loss in (row.loss_at_tokens, row.loss_at_time)),
    )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"

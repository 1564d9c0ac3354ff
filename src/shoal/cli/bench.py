"""`shoal bench`: measure the speed of several settings and compare them in a table and a plot."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shoal.cli.command import Group, Request
from shoal.cli.options import SETTINGS, Option, argument
from shoal.cli.output import print_json, print_paragraph, print_table, shown, stdout_console
from shoal.config.presets import Overrides, depth_overrides
from shoal.config.sync_choice import OUTER_METHODS, WIRE_FORMATS, WireChoice
from shoal.errors import RunFailed, UsageError
from shoal.run_folder import default_out
from shoal.units import (
    format_count,
    format_duration,
    format_percent,
    format_share,
    format_si,
    join_words,
    warn_of_other_programs,
)

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.tools.bench.levers import LeverRow, LeversResult, LeverTable
    from shoal.tools.bench.scaling import ScalingResult, ScalingRow


_TITLES = ("lever", "tokens/s", "×node", "×stock", "×top", "sent", "exposed", "loss", "timed")
_SCALING_TITLES = (
    "cluster", "ranks", "tokens/s", "speed-up", "efficiency", "step", "all-reduce p50", "all-reduce p95", "exposed",
    "wait"
)  # fmt: skip
# Of a range of --ranks or --nodes.
_MOST_ROWS = 64
_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")
_NEAR_CEILING = 0.95
# Defined here because shoal.tools.bench.levers imports numpy, and `--help` should not wait for that.
_WIRES = (str(WireChoice(name)) for name in WIRE_FORMATS if name != "fp32")
DEFAULT_LEVERS = ",".join(("stock", "ddp", *_WIRES, "accumulate:4", *OUTER_METHODS))

BENCH = Group(
    "bench",
    "Measure speed: by number of ranks, or by sync method.",
    preset=argument("What to train."),
    steps=replace(SETTINGS["steps"], help="Steps of each run; the second half is measured.", low=4),
    repeat=Option("Repetitions; the median one counts.", low=1),
    set_=Option("One setting, as section.key=value."),
    json=Option("Print the figures as JSON on stdout."),
)


@dataclass(frozen=True, kw_only=True)
class ScalingRequest(Request):
    preset: str = "grammar"
    on: list[str] | None = None
    nodes: str | None = None
    ranks: str | None = None
    depth: int | None = None
    steps: int = 60
    repeat: int = 1
    set_: list[str] | None = None
    out: Path | None = None
    json: bool = False
    csv: bool = False


@BENCH.command(
    on=Option(
        "A cluster to measure, one row each; may be repeated: local:1, local:1,device=cuda, lab:2,link=1gbit, "
        "hosts.toml.",
        shown="ranks of this machine",
    ),
    nodes=Option("With one --on: measure its first machines: 1,2,3 or 1..3.", shown="all"),
    ranks=Option("Without --on: numbers of ranks here, 1,2,4 or 1..4.", shown="1,2,4"),
    out=Option("The folder to create.", shown="runs/scaling-TIME"),
    csv=Option("Print the figures as CSV on stdout."),
)
def scaling(request: ScalingRequest) -> int:
    """Measure the same training on several clusters, and explain what limits the speed-up.

    Tokens per second on 1, 2, 4 … ranks of this machine (--ranks), on clusters that you name (--on, once for each), or
    on the first 1, 2, 3 machines of one cluster (--nodes). A row that cannot run is skipped, with the reason.
    """
    from shoal.cli.progress import make_display
    from shoal.cluster.slurm.job import enter_allocation
    from shoal.tools.bench.scaling import measure_scaling, scaling_csv, scaling_document

    refuse_wrong_rows(request.on or [], request.nodes, request.ranks)
    if request.json and request.csv:
        raise UsageError(
            "--json does not go with --csv",
            why="only one of them can be printed on stdout",
            fix="leave one out; both are files in the folder of the result: scaling.json and scaling.csv",
        )
    enter_allocation(*request.on or [])
    folder = request.out or default_out("scaling")
    rows = _scaling_rows(request, folder)
    result = measure_scaling(rows, folder, make_display, request.repeat, lambda text: sys.stderr.write(f"{text}\n"))
    if request.json:
        print_json(scaling_document(result))
    elif request.csv:
        sys.stdout.write(scaling_csv(result))
    else:
        print_clusters(result)
        report = f"\nreport:  {shown(result.report)}" if result.report else ""
        sys.stdout.write(f"\npicture: {shown(result.picture)}\ntable:   {shown(result.table)}{report}\n")
    return RunFailed.exit_code if any(row.status == "failed" for row in rows) else 0


def _scaling_rows(request: ScalingRequest, folder: Path) -> list[ScalingRow]:
    from shoal.config.load import merge
    from shoal.tools.bench.scaling import cluster_rows, node_rows, rank_rows

    flags = merge([depth_overrides(request.depth), {"train": {"steps": request.steps}}])
    config = scaling_config("shoal bench scaling", request.preset, flags, request.flags(), request.set_ or [])
    if request.nodes is not None:
        [cluster] = request.on or []
        return node_rows(config, cluster, parse_numbers("--nodes", request.nodes), folder)
    if request.on:
        return cluster_rows(config, request.on)
    return rank_rows(config, parse_numbers("--ranks", request.ranks or "1,2,4"))


@dataclass(frozen=True, kw_only=True)
class LeversRequest(Request):
    preset: str = "grammar"
    on: str = "local:2"
    levers: str = DEFAULT_LEVERS
    depth: int | None = None
    steps: int = 100
    repeat: int = 1
    set_: list[str] | None = None
    out: Path | None = None
    json: bool = False


@BENCH.command(
    on=replace(SETTINGS["on"], help="Where: local:2, lab:2,link=100mbit, or a hosts file.", shown=""),
    levers=Option(
        "Sync methods to compare, each METHOD[:NUMBER][+FORMAT]: stock,ddp,int8,accumulate:4+fp16,diloco:50."
    ),
    out=Option("The folder to create.", shown="runs/levers-TIME"),
)
def levers(request: LeversRequest) -> None:
    """Compare sync methods ("levers") on one model and cluster: speed, bytes sent, loss.

    A lever is one way to exchange gradients or weights between ranks: DDP, a smaller number format, fewer exchanges.
    For comparison, one node alone and, as the upper limit, all nodes without any exchange are measured too.
    """
    from shoal.cli.progress import make_display
    from shoal.cluster.slurm.job import enter_allocation
    from shoal.config.load import build_config, refuse_duplicate_settings
    from shoal.tools.bench.levers import measure_levers

    enter_allocation(request.on)
    flags: Overrides = {
        "train": {"steps": request.steps, "eval_every": max(1, request.steps // 10)},
        "run": {"on": request.on},
        **depth_overrides(request.depth),
    }
    sets = request.set_ or []
    refuse_duplicate_settings(request.flags(), sets)
    config = build_config(request.preset, flags=flags, sets=sets)
    result = measure_levers(config, request.levers, request.out or default_out("levers"), make_display, request.repeat)
    if request.json:
        print_json(levers_document(result))
        return
    print_levers(result.table)
    sys.stdout.write(f"\npicture: {shown(result.picture)}\nfigures: {shown(result.figures)}\n")


def scaling_config(command: str, preset: str, flags: Overrides, typed: dict[str, str], sets: list[str]) -> Config:
    """Build the settings of a comparison of rank counts. Refuse settings that it would ignore.

    `typed` are the flags of the command line, by setting.
    """
    from shoal.config.load import build_config, refuse_duplicate_settings, refuse_without_effect, typed_settings

    refuse_duplicate_settings(typed, sets)
    if "run.on" in typed_settings(None, sets):
        raise UsageError(
            f"--set run.on has no effect on {command}",
            why="it compares numbers of ranks on this machine, local:1, local:2 and so on",
            fix="leave it out; clusters are compared by: shoal bench scaling --on local:1 --on lab:3",
        )
    config = build_config(preset, flags=flags, sets=sets)
    refuse_without_effect(config, typed_settings(None, sets))
    return config


def refuse_wrong_rows(on: list[str], nodes: str | None, ranks: str | None) -> None:
    if on and ranks is not None:
        raise UsageError(
            f"--ranks {ranks} does not go with --on {on[0]}",
            why="--ranks measures numbers of ranks on this machine, and --on names the clusters to measure",
            fix="leave --ranks out, and write for example: --on local:1 --on local:2 --on lab:2,link=1gbit",
        )
    if nodes is not None and len(on) != 1:
        raise UsageError(
            f"--nodes {nodes} goes with one --on, and there {'are ' + str(len(on)) if on else 'is none'}",
            why="it measures the first machines of one cluster",
            fix=f"write for example: --nodes {nodes} --on {on[0] if on else 'hosts.toml'}",
        )


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse `3`, `1,2,4`, `1..4` or `1,2,4..8`."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= last - first < _MOST_ROWS:
            example = "1,2,4" if option == "--ranks" else "1,2,3"
            raise UsageError(
                f"{option} {text!r} is not a list of numbers",
                why=f"a list is as 1,2,4 or 1..4, with at most {_MOST_ROWS} numbers, the smaller one first",
                fix=f"write for example: {option} {example}",
            )
        numbers += range(first, last + 1)
    return numbers


def print_clusters(result: ScalingResult) -> None:
    """Print one row a cluster, what was skipped, and the paragraph that explains the figures."""
    from shoal.records.explain_run import explain_scaling
    from shoal.tools.bench.scaling import scaling_document

    console = stdout_console()
    rows = [(figures["cluster"], *_scaling_cells(figures)) for figures in scaling_document(result)["rows"]]
    print_table(_SCALING_TITLES, rows, range(1, len(_SCALING_TITLES)), console)
    for row in result.rows:
        if row.error is not None:
            print_paragraph(escape(row.problem), console)
    if len(result.points) > 1:
        console.print()
        print_paragraph(f"speed-up and efficiency: against {escape(result.points[0].label)}", console)
    console.print()
    print_paragraph(escape(explain_scaling(result.points)), console)


def _scaling_cells(figures: dict[str, Any]) -> list[str]:
    if figures["ranks"] is None:
        return [figures["status"], *["–"] * (len(_SCALING_TITLES) - 2)]
    times = ("allreduce_p50_ms", "allreduce_p95_ms", "exposed_ms", "wait_ms")
    return [
        str(figures["ranks"]),
        f"{figures['tokens_per_s']:,.0f}",
        _times(figures["speedup"]),
        "–" if figures["efficiency"] is None else format_percent(figures["efficiency"]),
        format_duration(figures["step_s"]),
        *("–" if figures[name] is None else format_duration(figures[name] / 1e3) for name in times),
    ]


def print_levers(table: LeverTable) -> None:
    console = stdout_console()
    print_table(_TITLES, [_cells(row) for row in table.rows], range(1, len(_TITLES)), console)
    console.print()
    for line in explain_levers(table):
        print_paragraph(escape(line), console)


def explain_levers(table: LeverTable) -> list[str]:
    """Explain the columns and what stands out."""
    lines = [
        "×node, ×stock, ×top: against one node, stock DDP, and all nodes without any exchange. sent: bytes of a step."
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

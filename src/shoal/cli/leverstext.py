"""What `shoal bench levers` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from shoal.cli.output import stdout_console
from shoal.report.wording import join, warn_of_other_programs
from shoal.units import format_count, format_duration, format_si

if TYPE_CHECKING:
    from shoal.report.levers import LeverRow, LeverTable
    from shoal.trials.levers import LeversResult

_TITLES = ("lever", "tokens/s", "×node", "×stock", "×top", "sent", "exposed", "loss", "timed")
_NEAR = 0.95


def print_levers(table: LeverTable) -> None:
    console = stdout_console()
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(_TITLES):
        grid.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*_cells(row))
    console.print(grid)
    for line in explain(table):
        console.print(line, highlight=False, soft_wrap=True)


def explain(table: LeverTable) -> list[str]:
    """What the columns mean, and what stands out."""
    lines = [
        "\n×node, ×stock, ×top: against one node, stock DDP, and all nodes without any exchange. sent: bytes of a step."
    ]
    if table.tokens is not None and table.seconds is not None:
        lines.append(
            f"loss, timed: validation losses after {format_count(table.tokens)} tokens, and after "
            f"{format_duration(table.seconds)} of steps, when the first of them was there."
        )
    rated = [row for row in table.rows if row.of_ceiling is not None and row.point.evaluations]
    near = [each.point.name for each in rated if (each.of_ceiling or 0) >= _NEAR and not each.is_above_ceiling]
    if near:
        lines.append(f"{join(near)}: within 5% of what these nodes compute without any exchange.")
    lines += _above_ceiling(table)
    slower = [row.point.name for row in rated if row.of_one_node is not None and row.of_one_node < 1]
    if slower:
        lines.append(f"{join(slower)}: slower than one node alone.")
    best = min(
        (row for row in table.rows if row.loss_at_time is not None),
        key=lambda row: row.loss_at_time or 0.0,
        default=None,
    )
    if best is not None:
        late = [row.point.name for row in table.rows if row.point.evaluations and row.loss_at_time is None]
        others = f" (not compared, since not evaluated by then: {join(late)})" if late else ""
        lines.append(f"Most learned in the same time: {best.point.name}{others}.")
    return [*lines, *([warning] if (warning := warn_of_load(table)) else [])]


def _above_ceiling(table: LeverTable) -> list[str]:
    lines = []
    above = [row for row in table.rows if row.is_above_ceiling]
    if fewer := [row.point.name for row in above if row.is_plausible]:
        lines.append(f"{join(fewer)}: faster than no exchange, because larger batches update the weights less often.")
    if wrong := [f"{row.point.name} ({row.of_ceiling:.2f}×)" for row in above if not row.is_plausible]:
        lines.append(
            f"! {join(wrong)}: not plausible. An exchange takes time, so the run without any was held "
            "back by something. Measure again with --repeat 3."
        )
    return lines


def warn_of_load(table: LeverTable) -> str:
    return warn_of_other_programs({f"with {row.point.name}": row.point.other_load for row in table.rows})


def levers_document(result: LeversResult) -> dict[str, object]:
    return {
        "rows": [_row_document(row) for row in result.table.rows],
        "compared_at": {"tokens": result.table.tokens, "seconds": result.table.seconds},
        "explanation": " ".join(line.strip() for line in explain(result.table)),
        "warning": warn_of_load(result.table) or None,
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
        f"{100 * point.exposed_s / point.step_s:.0f}%" if point.nodes > 1 else "–",
        *("–" if loss is None else f"{loss:.4f}" for loss in (row.loss_at_tokens, row.loss_at_time)),
    )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"

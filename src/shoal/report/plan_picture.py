"""A plan's picture: where a step's time would go on so many nodes, and what they would gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.plan import Plan, Row
from shoal.errors import ShoalError
from shoal.report.palette import IDEAL, MEASURED, PHASE_COLOURS, PHASE_NAMES
from shoal.report.plots import LOW, set_log_ticks, step_unit
from shoal.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = {
    "compute": ("forward + backward", PHASE_COLOURS["backward"]),
    "exposed": (PHASE_NAMES["exposed"], PHASE_COLOURS["exposed"]),
    "wait": (PHASE_NAMES["wait"], PHASE_COLOURS["wait"]),
    "optimizer": (PHASE_NAMES["optimizer"], PHASE_COLOURS["optimizer"]),
    "other": (PHASE_NAMES["other"], PHASE_COLOURS["other"]),
}
_MOST_LABELS = 16
# Nodes that lie so far apart are drawn by their logarithm.
_WIDE = 2


def plot_plan(plan: Plan, path: Path) -> None:
    """Writes a PNG, 1320 pixels wide."""
    figure = draw_plan(plan)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {error.strerror or error}",
            why="the picture goes where -o says",
            fix=f"make room or permissions there: df -h {path.parent}",
        ) from None


def draw_plan(plan: Plan) -> Figure:
    # Imported here because matplotlib takes longer to import than a plan takes to make.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        split, gain = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_split(split, plan.rows)
        _draw_gain(gain, plan.rows)
        figure.suptitle(f"{plan.workload.name}, predicted ({plan.lever})", x=0.01, ha="left", fontsize=11)
    return figure


def _draw_split(axes: Axes, rows: tuple[Row, ...]) -> None:
    names = [str(row.nodes) for row in rows]
    bottoms = [0.0] * len(rows)
    unit, per_s = step_unit(max(row.prediction.step.step_s for row in rows))
    tallest = per_s * max(row.prediction.step.step_s for row in rows)
    for part, (label, colour) in _PARTS.items():
        heights = [per_s * float(getattr(row.prediction.step, f"{part}_s")) for row in rows]
        if max(heights) < 1e-3 * tallest:
            continue
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, color=colour, label=label)
        if len(rows) <= _MOST_LABELS:
            labels = [format_number(height) if height > 0.07 * tallest else "" for height in heights]
            axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    # Beside the bars: hidden communication is no part of a step.
    shown = [(place + 0.38, per_s * row.prediction.step.comm_s) for place, row in enumerate(rows) if row.nodes > 1]
    places, comm = [place for place, _ in shown], [seconds for _, seconds in shown]
    axes.plot(places, comm, color="black", marker="<", ms=6, linestyle="none", label="all communication")
    middle, half = (len(rows) - 1) / 2, max(len(rows), 3) / 2
    axes.set(xlabel="nodes", ylabel=f"{unit} per step", xlim=(middle - half, middle + half))
    axes.margins(y=0.1)
    # Below: bars may be as high as the axis wherever it would stand.
    axes.legend(frameon=False, fontsize=9, handlelength=1, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    _title(axes, "Time of a step")


def _draw_gain(axes: Axes, rows: tuple[Row, ...]) -> None:
    nodes = [row.nodes for row in rows]
    axes.plot(nodes, [row.speedup / row.efficiency for row in rows], color=IDEAL, linestyle="--", label="ideal")
    axes.plot(nodes, [row.speedup for row in rows], color=MEASURED, marker="o", lw=2, label="predicted")
    axes.axhline(1, color=IDEAL, lw=0.8)
    is_wide = nodes[-1] >= _WIDE * len(nodes)
    if is_wide:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
    highest, lowest = max(row.speedup / row.efficiency for row in rows), min(row.speedup for row in rows)
    bottom, top = 0.3 * lowest if is_wide else 0.0, 1.1 * max(highest, 1.0)
    for row in rows if len(rows) <= _MOST_LABELS else ():
        note = f"{row.speedup:.2f}×\n{row.prediction.tokens_per_s:,.0f}"
        # Under its point, unless the axis with its own labels is there.
        offset, side = (8, "bottom") if not is_wide and row.speedup < LOW * top else (-8, "top")
        place = axes.annotate(
            note, (row.nodes, row.speedup), (0, offset), textcoords="offset points", ha="center", va=side, fontsize=8
        )
        place.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8})
    axes.set(xlabel="nodes", ylabel="times the fastest node alone", ylim=(bottom, top))
    if len(rows) <= _MOST_LABELS:
        axes.set_xticks(nodes, [str(count) for count in nodes])
    if is_wide:
        set_log_ticks(axes.yaxis, bottom, top)
    else:
        axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    _title(axes, "Speed-up, with tokens per second")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=10)

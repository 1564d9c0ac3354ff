"""The figures of a scaling experiment (PNG)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.records.scaling import ScalingPoint, efficiency, in_order
from shoal.tools.draw.palette import IDEAL, MEASURED, NOTE
from shoal.tools.draw.pictures import (
    LOW_LABEL_SHARE,
    add_label,
    legend_beside,
    new_figure,
    pick_labelled,
    save_figure,
    set_title,
    stack_steps,
)
from shoal.units import format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# In characters.
_NOTE_WIDTH = 190
_LONG_NAME = 24


def plot_scaling(points: list[ScalingPoint], path: Path) -> None:
    """Write the scaling figure as a PNG, 1200 pixels wide."""
    if not points:
        raise ValueError("a scaling figure needs at least one point")
    save_figure(draw_scaling(in_order(points)), path, "the figure goes beside the other files of the run")


def plot_clusters(points: list[ScalingPoint], path: Path, title: str, notes: Sequence[str] = ()) -> None:
    """Write the figure of a comparison of clusters as a PNG, 1320 pixels wide. The notes stand below."""
    why = "the picture goes beside the runs that it shows"
    save_figure(draw_clusters(points, title, notes), path, why)


def draw_scaling(points: list[ScalingPoint]) -> Figure:
    with new_figure(10, 4.4) as figure:
        speed, split = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _draw_speed(speed, points)
        stack_steps(split, [str(point.ranks) for point in points], [step_parts(point) for point in points])
        split.set_xlabel("ranks")
        set_title(split, "Time of a step")
        legend_beside(split, is_reversed=True)
    return figure


def draw_clusters(points: list[ScalingPoint], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draw one line a cluster: its speed with the speed-up against the first, and where the time of a step goes."""
    wrapped = [line for note in notes for line in textwrap.wrap(note, _NOTE_WIDTH)]
    height = 1.7 + 0.5 * max(2, len(points)) + 0.17 * len(wrapped)
    # Long names are broken at their commas.
    names = [point.label if len(point.label) < _LONG_NAME else point.label.replace(",", ",\n") for point in points]
    with new_figure(11, height, title) as figure:
        speed, split = figure.subplots(1, 2, sharey=True)
        _draw_cluster_speeds(speed, names, points)
        stack_steps(split, names, [step_parts(point) for point in points], is_level=True)
        split.tick_params(axis="y", left=False, labelleft=False)
        # Above the axes: a bar may be as long as they are.
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "columnspacing": 1}
        split.legend(frameon=False, fontsize=8, ncols=3, handlelength=1, **above)
        if wrapped:
            figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color=NOTE)
    return figure


def step_parts(point: ScalingPoint) -> dict[str, float]:
    """Return a step in seconds by the parts of PART_NAMES. Time that no phase covers is in `other`, so they add up."""
    parts = {"compute": point.compute_s}
    parts |= {phase: point.phases.get(phase, 0.0) for phase in ("exposed", "wait", "optimizer")}
    return parts | {"other": max(point.step_s - sum(parts.values()), 0.0)}


def _draw_speed(axes: Axes, points: list[ScalingPoint]) -> None:
    ranks = [point.ranks for point in points]
    base = points[0]
    ideal = [base.tokens_per_s * count / base.ranks for count in ranks]
    axes.plot(ranks, ideal, color=IDEAL, linestyle="--", label="ideal")
    axes.plot(ranks, [point.tokens_per_s for point in points], color=MEASURED, marker="o", lw=2, label="measured")
    top = 1.25 * max(*ideal, *(point.tokens_per_s for point in points))
    for point in (points[number] for number in pick_labelled(ranks)):
        reached = efficiency(point, base)
        note = f"{point.tokens_per_s:,.0f}\n({format_percent(reached)})"
        # Below the point, away from the ideal line, unless the labels of the axis are there.
        above = reached > 1 or point.tokens_per_s < LOW_LABEL_SHARE * top
        add_label(axes, note, (point.ranks, point.tokens_per_s), (0, 8 if above else -9))
    set_title(axes, "Speed, with efficiency against the ideal")
    axes.set(xlabel="ranks", ylabel="tokens per second", xticks=ranks, ylim=(0, top))
    axes.margins(x=0.16)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")


def _draw_cluster_speeds(axes: Axes, names: list[str], points: list[ScalingPoint]) -> None:
    speeds = [point.tokens_per_s for point in points]
    axes.barh(names, speeds, 0.62, color=[IDEAL, *[MEASURED] * (len(points) - 1)])
    for row, speed in enumerate(speeds):
        add_label(axes, f"{speed:,.0f}  ({speed / speeds[0]:.2f}×)", (speed, row), (4, 0), ha="left", va="center")
    axes.axvline(speeds[0], color=IDEAL, linestyle="--", lw=1, zorder=0)
    axes.set(xlabel="tokens per second", xlim=(0, 1.35 * max(speeds)))
    axes.set_title(f"Speed (× {points[0].label})", loc="left", fontsize=10)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")

"""The figures of a scaling experiment (PNG), and the colours that all figures share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.records.scaling import ScalingPoint, efficiency, in_order
from shoal.units import format_number, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


PHASE_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "wait": "wait for the slowest",
    "optimizer": "optimizer",
    "data": "data",
    "other": "other",
}
# The Okabe-Ito colours, which colour-blind readers can distinguish.
PHASE_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exposed": "#d55e00",
    "wait": "#e69f00",
    "optimizer": "#009e73",
    "data": "#cc79a7",
    "other": "#999999",
}
# Between the set's two blues: a thin line in the darker one is hard to see on a dark page.
MEASURED = "#1f86c7"
IDEAL = "#8a8a8a"
LINEAGE_COLOURS = ("#1f86c7", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")
VALIDATION = "#d55e00"

# Below this part of the axis a label under its point would overlap the labels of the axis.
LOW_LABEL_SHARE = 0.15

# Forward and backward are one block: the figure shows what is added to the computing time.
STACK = {
    "compute": ("forward + backward", "#0072b2"),
    "exposed": ("exposed communication", "#d55e00"),
    "wait": ("wait for the slowest", "#e69f00"),
    "optimizer": ("optimizer", "#009e73"),
    "other": ("data and other", "#999999"),
}

# Of the range of all points: labels of two lines that are nearer to each other overlap.
_LABEL_SHARE = 0.14
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


def save_figure(figure: Figure, path: Path, why: str) -> None:
    """Write a PNG, whatever the file is called; `why` says in an error why it is written there."""
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {error.strerror or error}",
            why=why,
            fix=f"make room or permissions there: df -h {path.parent}",
        ) from None


def draw_scaling(points: list[ScalingPoint]) -> Figure:
    # Imported here because matplotlib takes longer to import than most commands take to run. `Figure` without pyplot
    # uses Agg, needs no display and leaves no global state behind.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        speed, split = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _draw_speed(speed, points)
        _draw_split(split, points)
    return figure


def draw_clusters(points: list[ScalingPoint], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draw one line a cluster: its speed with the speed-up against the first, and where the time of a step goes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    wrapped = [line for note in notes for line in textwrap.wrap(note, _NOTE_WIDTH)]
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        height = 1.7 + 0.5 * max(2, len(points)) + 0.17 * len(wrapped)
        figure = Figure(figsize=(11, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
        speed, split = figure.subplots(1, 2, sharey=True)
        _draw_cluster_speeds(speed, points)
        _draw_cluster_steps(split, points)
        if wrapped:
            figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return figure


def step_parts(point: ScalingPoint) -> dict[str, float]:
    """Return a step in milliseconds by the parts of STACK. Time that no phase covers is in `other`, so they add up."""
    parts = {"compute": point.compute_s}
    parts |= {phase: point.phases.get(phase, 0.0) for phase in ("exposed", "wait", "optimizer")}
    parts["other"] = max(point.step_s - sum(parts.values()), 0.0)
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def step_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for step times and its number per second, so that labels of three digits fit into a bar."""
    return ("seconds", 1.0) if longest_s >= 1 else ("milliseconds", 1e3)


def set_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set at least three numbered ticks: powers of ten alone may give one or none."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: format_number(value))


def pick_labelled(places: Sequence[float]) -> list[int]:
    """Return which of some points, in ascending order, are far enough apart for a label; the last one always is."""
    least = _LABEL_SHARE * (places[-1] - places[0])
    chosen: list[int] = []
    for number in reversed(range(len(places))):
        if not chosen or places[chosen[-1]] - places[number] >= least:
            chosen.append(number)
    return chosen[::-1]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) > 2:
            return ticks
    return [low, math.sqrt(low * high), high]


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
        _note(axes, note, (point.ranks, point.tokens_per_s), 8 if above else -9)
    axes.set_title("Speed, with efficiency against the ideal", loc="left", fontweight="bold", fontsize=10)
    axes.set(xlabel="ranks", ylabel="tokens per second", xticks=ranks, ylim=(0, top))
    axes.margins(x=0.16)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")


def _draw_split(axes: Axes, points: list[ScalingPoint]) -> None:
    names = [str(point.ranks) for point in points]
    bottoms = [0.0] * len(points)
    unit, per_s = step_unit(max(point.step_s for point in points))
    largest = per_s * max(point.step_s for point in points)
    for part, (label, colour) in STACK.items():
        heights = [1e-3 * per_s * step_parts(point)[part] for point in points]
        bars = axes.bar(names, heights, 0.55, bottom=bottoms, color=colour, label=label)
        labels = [format_number(height) if height > 0.06 * largest else "" for height in heights]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, total in enumerate(bottoms):
        _note(axes, format_number(total), (position, total), 3)
    axes.set_title("Time of a step", loc="left", fontweight="bold", fontsize=10)
    middle, half = (len(points) - 1) / 2, max(len(points), 3) / 2
    axes.set(xlabel="ranks", ylabel=f"{unit} per step", xlim=(middle - half, middle + half))
    axes.margins(y=0.12)
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], texts[::-1], frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1), handlelength=1
    )


def _note(axes: Axes, text: str, at: tuple[float, float], offset: int) -> None:
    """Write a label above the point (positive offset, in typographic points) or below it (negative)."""
    vertical = "bottom" if offset > 0 else "top"
    place = axes.annotate(text, at, (0, offset), textcoords="offset points", ha="center", va=vertical, fontsize=9)
    place.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85})


def _draw_cluster_speeds(axes: Axes, points: list[ScalingPoint]) -> None:
    names, speeds = _bar_names(points), [point.tokens_per_s for point in points]
    colours = [IDEAL, *[MEASURED] * (len(points) - 1)]
    bars = axes.barh(names, speeds, 0.62, color=colours)
    labels = [f"{speed:,.0f}  ({speed / speeds[0]:.2f}×)" for speed in speeds]
    for text in axes.bar_label(bars, labels, padding=4, fontsize=9):
        text.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85})
    axes.axvline(speeds[0], color=IDEAL, linestyle="--", lw=1, zorder=0)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second", xlim=(0, 1.35 * max(speeds)))
    axes.set_title(f"Speed (× {points[0].label})", loc="left", fontsize=10)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _bar_names(points: list[ScalingPoint]) -> list[str]:
    """Break long names of clusters at their commas."""
    return [point.label if len(point.label) < _LONG_NAME else point.label.replace(",", ",\n") for point in points]


def _draw_cluster_steps(axes: Axes, points: list[ScalingPoint]) -> None:
    names, starts = _bar_names(points), [0.0] * len(points)
    unit, per_s = step_unit(max(point.step_s for point in points))
    largest = per_s * max(point.step_s for point in points)
    for part, (label, colour) in STACK.items():
        widths = [1e-3 * per_s * step_parts(point)[part] for point in points]
        bars = axes.barh(names, widths, 0.62, left=starts, color=colour, label=label)
        labels = [format_number(width) if width > 0.07 * largest else "" for width in widths]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.bar_label(bars, [format_number(total) for total in starts], padding=4, fontsize=9)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set(xlabel=f"{unit} per step", xlim=(0, 1.15 * largest))
    axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
    axes.legend(
        frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1, columnspacing=1
    )

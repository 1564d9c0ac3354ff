"""The picture of an experiment with levers: how fast each was, and what it had learned by when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.report.levers import CEILING, ONE_NODE, LeverRow, LeverTable
from shoal.report.palette import IDEAL, MEASURED, PHASE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's set, and behind it the same again in dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def plot_levers(table: LeverTable, path: Path) -> None:
    """Writes a PNG, 1320 pixels wide."""
    figure = draw_levers(table)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {error.strerror or error}",
            why="the picture goes beside the runs that it shows",
            fix=f"make room or permissions there: df -h {path.parent}",
        ) from None


def draw_levers(table: LeverTable) -> Figure:
    # Imported here because matplotlib takes longer to import than most commands take to run.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 1.6 + 0.32 * max(8, len(table.rows))), layout="constrained")
        speed, learned = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_speed(speed, table.rows)
        _draw_loss(learned, table.rows)
    return figure


def _draw_speed(axes: Axes, rows: tuple[LeverRow, ...]) -> None:
    """The grey end of a bar is what the network took: as fast would it be if nobody waited for it."""
    names = [row.point.name for row in rows]
    speeds = [row.point.tokens_per_s for row in rows]
    colours = [IDEAL if name in (ONE_NODE, CEILING) else MEASURED for name in names]
    axes.barh(names, speeds, 0.62, color=colours)
    lost = [_unexposed(row) - speed for row, speed in zip(rows, speeds, strict=True)]
    ends = axes.barh(
        names, lost, 0.62, left=speeds, color=PHASE_COLOURS["exposed"], alpha=0.35, label="lost to the network"
    )
    for text in axes.bar_label(ends, [_label(row) for row in rows], label_type="edge", padding=4, fontsize=9):
        text.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85})
    ceiling = next((row.point.tokens_per_s for row in rows if row.point.name == CEILING), None)
    if ceiling is not None:
        axes.axvline(ceiling, color=IDEAL, linestyle="--", lw=1)
    axes.invert_yaxis()
    room = 1.28 if all(row.is_plausible for row in rows) else 1.8
    axes.set(xlabel="tokens per second", xlim=(0, room * max(map(_unexposed, rows))))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if max(lost) > 0.02 * max(speeds):
        # Below: a bar may be as long as the axis.
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.11), handlelength=1)
    axes.set_title("Speed, and times one node", loc="left", fontweight="bold", fontsize=10)


def _unexposed(row: LeverRow) -> float:
    point = row.point
    return point.tokens_per_step / max(point.step_s - point.exposed_s, 0.05 * point.step_s)


def _label(row: LeverRow) -> str:
    label = f"{row.point.tokens_per_s:,.0f}"
    if row.of_one_node is not None and row.point.name != ONE_NODE:
        label += f"  ({row.of_one_node:.2f}×)"
    return label if row.is_plausible else f"{label}, not plausible"


def _draw_loss(axes: Axes, rows: tuple[LeverRow, ...]) -> None:
    drawn = [row.point for row in rows if row.point.evaluations]
    for number, point in enumerate(drawn):
        colour = IDEAL if point.name == ONE_NODE else _COLOURS[number % len(_COLOURS)]
        seconds, losses = zip(*((each.seconds, each.loss) for each in point.evaluations), strict=True)
        style = "-" if number < len(_COLOURS) else "--"
        axes.plot(seconds, losses, color=colour, linestyle=style, marker=".", lw=1.5, label=point.name)
    axes.set(xlabel="seconds of training", ylabel="validation loss")
    axes.grid(axis="y", alpha=0.25)
    axes.set_title("What was learned by when", loc="left", fontweight="bold", fontsize=10)
    if drawn:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1, 1), handlelength=1.5)

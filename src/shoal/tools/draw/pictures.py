"""Pictures in PNG files: the style of all of them, and the parts that several have.

Only this module imports matplotlib; the modules of the pictures get a figure and draw on its axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.tools.draw.palette import PART_COLOURS, PART_NAMES
from shoal.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# Below this part of the axis a label under its point would overlap the labels of the axis.
LOW_LABEL_SHARE = 0.15
# Of the range of all points: labels of two lines that are nearer to each other overlap.
_LABEL_SHARE = 0.14
# Of the longest bar: a part that is shorter has no label, and one that no bar has more of is not drawn.
_LABELLED_PART, _DRAWN_PART = 0.07, 1e-3
# White labels that all bars side by side have room for, in characters.
_BAR_CHARACTERS = 44
_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_WHITE_BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


@contextmanager
def new_figure(width: float, height: float, headline: str = "") -> Iterator[Figure]:
    """Give an empty figure of 120 pixels per unit; what is drawn within the context has the style of all pictures."""
    # Imported here because matplotlib takes longer to import than most commands take to run. `Figure` without pyplot
    # uses Agg, needs no display and leaves no global state behind.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        if headline:
            figure.suptitle(headline, x=0.01, ha="left", fontsize=11)
        yield figure


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


def set_title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=10)


def add_label(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any) -> Text:
    """Write a label beside a point, on white; the offset is in typographic points."""
    look = {"ha": "center", "va": "bottom" if offset[1] > 0 else "top", "fontsize": 9} | look
    label = axes.annotate(text, at, offset, textcoords="offset points", **look)
    label.set_bbox(_WHITE_BOX)
    return label


def legend_below(axes: Axes, columns: int) -> None:
    """Place the legend below the axes: a bar may be as long as the axes at any place inside."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
    axes.legend(frameon=False, fontsize=9, handlelength=1.2, ncols=columns, **place)


def legend_beside(axes: Axes, *, is_reversed: bool = False) -> None:
    """Place the legend on the right of the axes; reversed, it has the order of bars stacked upwards."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "reverse": is_reversed}
    axes.legend(frameon=False, fontsize=9, handlelength=1.2, **place)


def step_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for step times and its number per second, so that labels of three digits fit into a bar."""
    return ("seconds", 1.0) if longest_s >= 1 else ("milliseconds", 1e3)


def stack_steps(
    axes: Axes,
    names: Sequence[str],
    steps: Sequence[Mapping[str, float]],
    *,
    is_level: bool = False,
    totals: bool = True,
) -> float:
    """Draw a bar for each step, upwards or level: its parts by PART_NAMES, in seconds. Return the unit per second."""
    unit, per_s = step_unit(max(sum(step.values()) for step in steps))
    ends, largest = [0.0] * len(steps), per_s * max(sum(step.values()) for step in steps)
    for part, name in PART_NAMES.items():
        values = [per_s * step[part] for step in steps]
        if max(values) < _DRAWN_PART * largest:
            continue
        draw = axes.barh if is_level else axes.bar
        where: dict[str, Any] = {"left" if is_level else "bottom": ends}
        bars = draw(list(names), values, 0.6, color=PART_COLOURS[part], label=name, **where)
        labels = [format_number(value) if value > _LABELLED_PART * largest else "" for value in values]
        if is_level or max(map(len, labels)) * len(steps) <= _BAR_CHARACTERS:
            axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8.5)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    if totals:
        for text in axes.bar_label(bars, [format_number(end) for end in ends], padding=3, fontsize=9):
            text.set_bbox(_WHITE_BOX)
    if is_level:
        axes.set(xlabel=f"{unit} per step", xlim=(0, 1.15 * largest))
        axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
        axes.invert_yaxis()
    else:
        middle, half = (len(steps) - 1) / 2, max(len(steps), 3) / 2
        axes.set(ylabel=f"{unit} per step", xlim=(middle - half, middle + half))
        axes.margins(y=0.12)
    return per_s


def set_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set at least three numbered ticks: powers of ten alone may give one or none."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: format_number(value))


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) > 2:
            return ticks
    return [low, math.sqrt(low * high), high]


def pick_labelled(places: Sequence[float]) -> list[int]:
    """Return which of some points, in ascending order, are far enough apart for a label; the last one always is."""
    least = _LABEL_SHARE * (places[-1] - places[0])
    chosen: list[int] = []
    for number in reversed(range(len(places))):
        if not chosen or places[chosen[-1]] - places[number] >= least:
            chosen.append(number)
    return chosen[::-1]

"""The picture of a lesson: what its check asks for, or bars of prediction, theory and measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.tools.draw.palette import SERIES
from shoal.tools.draw.pictures import legend_below, new_figure, save_figure
from shoal.tools.learn.experiment import Bars, Lines
from shoal.tools.learn.judge import JudgedPrediction
from shoal.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7.0, 3.6


def draw_picture(picture: Bars | Lines | None, title: str, judged: Sequence[JudgedPrediction], path: Path) -> None:
    """Draw the picture; a lesson without numbers and without one of its own has none."""
    picture = picture or _bars_of(title, judged)
    if picture is None:
        return
    with new_figure(_WIDTH, _HEIGHT, picture.title) as figure:
        axes = figure.subplots()
        if isinstance(picture, Lines):
            _draw_lines(axes, picture)
        else:
            _draw_bars(axes, picture)
        if len(picture.series) > 1:
            legend_below(axes, min(len(picture.series), 4))
        save_figure(figure, path, "the lesson's picture belongs to its folder")


def _draw_lines(axes: Axes, lines: Lines) -> None:
    for number, (name, (x, y)) in enumerate(lines.series.items()):
        axes.plot(list(x), list(y), color=SERIES[number % len(SERIES)], label=name)
    axes.set(xlabel=lines.x, ylabel=lines.y)
    if all(isinstance(place, int) for x, _ in lines.series.values() for place in x):
        axes.locator_params(axis="x", integer=True)


def _draw_bars(axes: Axes, picture: Bars) -> None:
    count = len(picture.series)
    width = 0.8 / count
    for number, (name, values) in enumerate(picture.series.items()):
        places = [place + (number - (count - 1) / 2) * width for place in range(len(picture.names))]
        bars = axes.bar(places, list(values), 0.92 * width, color=SERIES[number % len(SERIES)], label=name)
        axes.bar_label(bars, [format_number(value) for value in values], padding=2, fontsize=9)
    axes.set_xticks(range(len(picture.names)), list(picture.names))
    axes.set(ylabel=picture.unit)
    axes.margins(y=0.15)


def _bars_of(title: str, judged: Sequence[JudgedPrediction]) -> Bars | None:
    numbers = [one for one in judged if isinstance(one.prediction, float) or isinstance(one.measured, float)]
    if not numbers:
        return None
    series = {
        name: [float(value) if isinstance(value := getattr(one, field), float | int) else 0.0 for one in numbers]
        for name, field in (("prediction", "prediction"), ("theory", "theory"), ("measurement", "measured"))
    }
    units = {one.unit for one in numbers}
    unit = units.pop() if len(units) == 1 else ""
    return Bars(title, unit, [one.label for one in numbers], {name: one for name, one in series.items() if any(one)})

"""The charts of a page, for assets/chart.js to draw.

A curve is thinned honestly: what is drawn of many steps has their lowest and their highest value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.tools.draw.palette import SERIES

Figure = dict[str, Any]  # assets/chart.js says what it has
Floats = NDArray[np.float64]

MAX_POINTS = 1000
# All ranks together: 64 ranks must not make the page of a long run large.
_MAX_ROWS = 8 * MAX_POINTS
_LEAST_ROWS = 100
# A distance of this many usual ones between two rows is a gap: the rank was away.
_GAP = 3
_BAR_PX = 34


def make_lines(series: Sequence[Figure], x: str, y: str, *, zero: bool = True, legend: bool | None = None) -> Figure:
    """Return curves. An axis that begins at zero makes a flat line of a value such as an accuracy near 1."""
    return {"kind": "lines", "series": series, "x": x, "y": y, "zero": zero, "legend": legend, "height": 360}


def make_bars(names: Sequence[str], series: Sequence[Figure], x: str) -> Figure:
    """Return horizontal bars, one for each name."""
    height = 56 + _BAR_PX * len(names)
    return {"kind": "bars", "names": names, "series": series, "x": x, "height": height}


def stack_parts(names: Sequence[str], parts: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> Figure:
    """Stack the parts of steps, given in seconds, one bar for each name. The keys of `titles` are colours too."""
    series = [
        {"name": title, "colour": part, "values": [_short(1e3 * each.get(part, 0.0)) for each in parts]}
        for part, title in titles.items()
        if any(each.get(part) for each in parts)
    ]
    return make_bars(names, series, "ms per step")


def make_areas(
    names: Mapping[str, str], steps: NDArray[np.int64], parts: Mapping[str, Floats], ranks: int = 1
) -> Figure:
    """Stack the parts of each step, in ms; `names` are those of the parts, whose colours have the same keys.

    Of more steps than can be drawn each row is the mean of some, and has the longest of them as well.
    """
    known = {part: 1e3 * np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) for part, values in parts.items()}
    known = {part: values for part, values in known.items() if values.any()}
    most = max(_LEAST_ROWS, min(MAX_POINTS, _MAX_ROWS // ranks))
    is_thinned = len(steps) > most
    rows: list[list[float] | None] = []
    totals = np.sum(list(known.values()), axis=0)
    usual = max(1.0, len(steps) / most)
    for group in np.array_split(np.arange(len(steps)), min(most, len(steps))) if known else ():
        row = [int(steps[group[0]]), *(_short(float(values[group].mean())) for values in known.values())]
        if rows and rows[-1] and row[0] - rows[-1][0] > _GAP * usual:
            rows.append(None)
        rows.append([*row, _short(float(totals[group].max()))] if is_thinned else row)
    series = [{"name": names[part], "colour": part} for part in known]
    panels = [{"name": "", "rows": rows}]
    unit = "ms per step: means, and the longest as a line" if is_thinned else "ms per step"
    labels = {"x": "step", "y": unit, "height": 360}
    return {"kind": "areas", "series": series, "panels": panels, "thinned": is_thinned, **labels}


def series_colour(number: int) -> str:
    return f"series-{number % len(SERIES)}"


def make_curve(name: str, colour: str, x: Sequence[int], y: Sequence[float], **look: Any) -> Figure:
    """Return one series of `make_lines`; a value that is not finite is a gap."""
    points = [[place, _short(value) if math.isfinite(value) else None] for place, value in zip(x, y, strict=True)]
    return {"name": name, "colour": colour, "points": points, **look}


def thin_keeping_extremes(steps: NDArray[np.int64], values: Floats) -> tuple[list[int], list[float]]:
    """Keep the lowest and the highest of each group of steps, so that no spike is lost, and a gap where one has any."""
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), values.tolist()
    keep: set[int] = set()
    for group in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        is_known = np.isfinite(values[group])
        if known := group[is_known].tolist():
            keep |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        keep |= set(group[~is_known][:1].tolist())
    rows = sorted(keep)
    return steps[rows].tolist(), values[rows].tolist()


def thin_with_envelope(steps: NDArray[np.int64], values: Floats) -> list[list[float | None]]:
    """Return points of `make_lines`: of many, means of groups of steps, each with the lowest and the highest."""
    points: list[list[float | None]] = []
    for group in np.array_split(np.arange(len(steps)), min(len(steps), MAX_POINTS) or 1):
        known = values[group][np.isfinite(values[group])]
        if not len(known):
            points += [[int(steps[row]), None] for row in group[:1]]
            continue
        band = [_short(float(known.min())), _short(float(known.max()))] if len(group) > 1 else []
        points.append([int(steps[group[0]]), _short(float(known.mean())), *band])
    return points


def _short(value: float) -> float:
    """Return five digits: on a chart more cannot be seen."""
    text = f"{value:.5g}"
    return int(text) if text.isdecimal() else float(text)


def chart_place(name: str, figures: dict[str, Figure]) -> str:
    """Return the place of a figure on the page; nothing if it has no data."""
    return f'<div class="chart" data-figure="{escape(name)}"></div>' if name in figures else ""

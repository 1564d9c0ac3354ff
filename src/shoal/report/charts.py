"""The figures of the report page, as plain plotly data. Pure: colours of text and paper come with the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.report.members_picture import has_changed, members_chart
from shoal.report.palette import IDEAL, MEASURED, PHASE_COLOURS, PHASE_NAMES, VALIDATION
from shoal.report.plots import STACK, step_parts
from shoal.report.ranklog import Floats, Steps
from shoal.report.scaling import ScalingPoint, in_order
from shoal.report.summary import RankSummary, Summary

Figure = dict[str, Any]

MAX_POINTS = 1000


def charts(summary: Summary, scaling: list[ScalingPoint]) -> dict[str, Figure]:
    """Every figure that has something to show, by the id of its place on the page."""
    figures: dict[str, Figure] = {}
    if len(summary.loss):
        figures["loss"] = loss_chart(summary)
    if any(rank.phases for rank in summary.ranks.values()):
        figures["medians"] = medians_chart(summary)
        figures |= {f"steps-{rank.rank}": steps_chart(rank) for rank in summary.ranks.values() if rank.phases}
    if has_changed(summary):
        figures["members"] = members_chart(summary)
    if scaling:
        figures["speed"] = speed_chart(in_order(scaling))
        figures["split"] = split_chart(in_order(scaling))
    return figures


def loss_chart(summary: Summary) -> Figure:
    steps, loss = thin_keeping_extremes(summary.loss_steps, summary.loss)
    traces = [_line("training", steps, loss, MEASURED)]
    if summary.val_loss:
        at = sorted(summary.val_loss)
        validation = _line("validation", at, [_json_number(summary.val_loss[step]) for step in at], VALIDATION)
        traces.append({**validation, "mode": "lines+markers"})
    return _figure(traces, x="step", y="loss (nats per token)")


def steps_chart(rank: RankSummary) -> Figure:
    """Where each step's time went, stacked; averaged over neighbours where there are more steps than pixels."""
    traces = []
    for phase, name in PHASE_NAMES.items():
        steps, seconds = thin_by_mean(rank.steps, rank.series[f"{phase}_s"])
        if any(seconds):
            area = {"stackgroup": "step", "mode": "none", "fillcolor": PHASE_COLOURS[phase]}
            traces.append({"name": name, "x": steps, "y": _milliseconds(seconds), **area, "hoverinfo": "x+y+name"})
    return _without_legend(_figure(traces, x="step", y="ms per step"))


def medians_chart(summary: Summary) -> Figure:
    ranks = [rank for rank in summary.ranks.values() if rank.phases]
    names = [f"rank {rank.rank}" for rank in ranks]
    traces = []
    for phase, name in PHASE_NAMES.items():
        seconds = [rank.typical.get(phase, 0.0) for rank in ranks]
        if any(seconds):
            traces.append(_bar(name, _milliseconds(seconds), names, PHASE_COLOURS[phase], horizontal=True))
    figure = _figure(traces, x="ms per step", y="")
    figure["layout"] |= {"barmode": "stack", "height": 90 + 44 * len(ranks)}
    figure["layout"]["yaxis"] |= {"autorange": "reversed"}
    return _without_legend(figure)


def speed_chart(points: list[ScalingPoint]) -> Figure:
    ranks = [point.ranks for point in points]
    base = points[0]
    ideal = _line("ideal", ranks, [base.tokens_per_s * n / base.ranks for n in ranks], IDEAL)
    ideal["line"]["dash"] = "dash"
    measured = _line("measured", ranks, [point.tokens_per_s for point in points], MEASURED)
    figure = _figure([ideal, {**measured, "mode": "lines+markers"}], x="ranks", y="tokens per second")
    figure["layout"]["xaxis"] |= {"tickvals": ranks}
    return figure


def split_chart(points: list[ScalingPoint]) -> Figure:
    names = [str(point.ranks) for point in points]
    parts = [step_parts(point) for point in points]
    traces = [
        _bar(label, names, [round(part[cause], 3) for part in parts], colour)
        for cause, (label, colour) in STACK.items()
    ]
    figure = _figure(traces, x="ranks", y="ms per step")
    figure["layout"] |= {"barmode": "stack"}
    figure["layout"]["xaxis"] |= {"type": "category"}
    return figure


def thin_keeping_extremes(steps: Steps, values: Floats) -> tuple[list[int], list[float | None]]:
    """At most `MAX_POINTS`: of each group of steps the lowest and the highest, so that no spike is lost."""
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), [_json_number(value) for value in values.tolist()]
    keep: set[int] = set()
    for group in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        known = np.nan_to_num(values[group], nan=math.inf)
        keep |= {int(group[known.argmin()]), int(group[known.argmax()])}
    rows = sorted(keep)
    return steps[rows].tolist(), [_json_number(value) for value in values[rows].tolist()]


def thin_by_mean(steps: Steps, values: Floats) -> tuple[list[int], list[float]]:
    """At most `MAX_POINTS`, each the mean of its group of steps; a step that recorded nothing counts as zero."""
    known = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), known.tolist()
    groups = np.array_split(np.arange(len(steps)), MAX_POINTS)
    return [int(steps[group[0]]) for group in groups], [float(known[group].mean()) for group in groups]


def _figure(traces: list[Figure], x: str, y: str) -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    return {"data": traces, "layout": {**axes, "height": 360}}


def _without_legend(figure: Figure) -> Figure:
    """The page has one legend for all figures of phases."""
    figure["layout"]["showlegend"] = False
    return figure


def _line(name: str, x: list[int], y: list[Any], colour: str) -> Figure:
    return {"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "line": {"color": colour, "width": 2}}


def _bar(name: str, x: list[Any], y: list[Any], colour: str, horizontal: bool = False) -> Figure:
    turned = {"orientation": "h"} if horizontal else {}
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "width": 0.55, **turned}


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(value * 1e3, 3) for value in seconds]


def _json_number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity; a gap in the curve says it better than a string."""
    return value if math.isfinite(value) else None

"""Figures of a plan (where a step's time goes, and the speed-up) and of a simulation (speed over time, time lost)."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.tools.plan.advise import Advice, Plan, PlanRow, explain_unequal_parts, recommended_plan
from shoal.tools.plan.scenario import Policy
from shoal.tools.plan.simulation import Band, Cause, Forecast
from shoal.tools.report.figures import (
    IDEAL,
    LOW_LABEL_SHARE,
    MEASURED,
    PHASE_COLOURS,
    PHASE_NAMES,
    pick_labelled,
    save_figure,
    set_log_ticks,
    step_unit,
)
from shoal.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_PARTS = {
    "compute": ("forward + backward", PHASE_COLOURS["backward"]),
    "exposed": (PHASE_NAMES["exposed"], PHASE_COLOURS["exposed"]),
    "wait": (PHASE_NAMES["wait"], PHASE_COLOURS["wait"]),
    "optimizer": (PHASE_NAMES["optimizer"], PHASE_COLOURS["optimizer"]),
    "other": (PHASE_NAMES["other"], PHASE_COLOURS["other"]),
}
_BAR_CHARACTERS = 44  # Characters of white labels that all bars side by side have room for.
_MOST_LABELS = 16
_NOTE_CHARACTERS = 66
# A range of nodes this many times as wide as the number of rows gets a logarithmic axis.
_WIDE = 2

LABELS: dict[Cause, str] = {
    "straggling": "waiting for the slowest rank",
    "reduced": "fewer nodes",
    "checkpointing": "checkpoints",
    "detection": "noticing a failure",
    "recovery": "restart or regroup",
    "redone": "steps done again",
    "waiting": "waiting for nodes",
}
COLOURS: dict[Policy, str] = {"restart": PHASE_COLOURS["exposed"], "live": PHASE_COLOURS["backward"]}
# From this many hours on the axis shows days.
_DAYS_FROM_H = 72.0
# A smaller fraction of lost time is not drawn.
_LEAST_SHARE = 5e-4


# A plan


def plot_plan(plan: Plan, advice: Advice, path: Path) -> None:
    """Write a PNG, 1320 pixels wide."""
    save_figure(draw_plan(plan, advice), path, "the picture goes where -o says")


def draw_plan(plan: Plan, advice: Advice) -> Figure:
    """Draw the plan by the strategy that the verdict names."""
    # Imported here because importing matplotlib takes longer than making a plan.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        split, gain = figure.subplots(1, 2, width_ratios=(1.15, 1))
        shown = recommended_plan(plan, advice)
        _draw_split(split, shown.rows)
        _draw_gain(gain, shown)
        figure.suptitle(
            f"Predicted for {plan.workload.name}: {_headline(plan, advice)}", x=0.01, ha="left", fontsize=11
        )
    return figure


def _headline(plan: Plan, advice: Advice) -> str:
    if (best := advice.best) is not None:
        return f"{best.row.nodes} nodes by {best.strategy} train {best.row.speedup:.2f} times as fast as {_base(plan)}"
    if plan.distributed_rows:
        return f"{_base(plan)} is faster than several by {plan.strategy}"
    return f"one node, by {plan.strategy}"


def _base(plan: Plan) -> str:
    return "one" if len(set(plan.setting.node_names)) == 1 else f"{plan.rows[-1].base} alone"


def _draw_split(axes: Axes, rows: tuple[PlanRow, ...]) -> None:
    names = [str(row.nodes) for row in rows]
    bottoms = [0.0] * len(rows)
    unit, per_s = step_unit(max(row.prediction.step.step_s for row in rows))
    tallest = per_s * max(row.prediction.step.step_s for row in rows)
    for part, (label, colour) in _PARTS.items():
        heights = [per_s * float(getattr(row.prediction.step, f"{part}_s")) for row in rows]
        if max(heights) < 1e-3 * tallest:
            continue
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, color=colour, label=label)
        labels = [format_number(height) if height > 0.07 * tallest else "" for height in heights]
        if max(map(len, labels)) * len(rows) <= _BAR_CHARACTERS:
            axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    # Beside the bars, because hidden communication is not part of a step.
    shown = [(place + 0.38, per_s * row.prediction.step.comm_s) for place, row in enumerate(rows) if row.nodes > 1]
    places, comm = [place for place, _ in shown], [seconds for _, seconds in shown]
    axes.plot(places, comm, color="black", marker="<", ms=6, linestyle="none", label="all communication")
    middle, half = (len(rows) - 1) / 2, max(len(rows), 3) / 2
    axes.set(xlabel="nodes", ylabel=f"{unit} per step", xlim=(middle - half, middle + half))
    axes.margins(y=0.1)
    # Below the axes, because bars may be as high as the axes at any place inside.
    axes.legend(frameon=False, fontsize=9, handlelength=1, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    _title(axes, "Time of a step")


def _draw_gain(axes: Axes, plan: Plan) -> None:
    rows = plan.rows
    nodes = [row.nodes for row in rows]
    axes.plot(nodes, [row.speedup / row.efficiency for row in rows], color=IDEAL, linestyle="--", label="ideal")
    axes.plot(nodes, [row.speedup for row in rows], color=MEASURED, marker="o", lw=2, label=str(plan.strategy))
    axes.axhline(1, color=IDEAL, lw=0.8)
    is_wide = nodes[-1] >= _WIDE * len(nodes)
    if is_wide:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
    highest, lowest = max(row.speedup / row.efficiency for row in rows), min(row.speedup for row in rows)
    bottom, top = 0.3 * lowest if is_wide else 0.0, 1.1 * max(highest, 1.0)
    labelled = pick_labelled([math.log(count) if is_wide else count for count in nodes])
    for row in (rows[number] for number in labelled) if len(rows) <= _MOST_LABELS else ():
        text = f"{row.speedup:.2f}×\n{row.prediction.tokens_per_s:,.0f}"
        # Below its point, unless the labels of the axis are there.
        offset, side = (8, "bottom") if not is_wide and row.speedup < LOW_LABEL_SHARE * top else (-8, "top")
        label = axes.annotate(
            text, (row.nodes, row.speedup), (0, offset), textcoords="offset points", ha="center", va=side, fontsize=8
        )
        label.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8})
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
    if note := explain_unequal_parts(plan):
        below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
        axes.annotate(textwrap.fill(note, _NOTE_CHARACTERS), (0, 0), (0, -40), color=IDEAL, fontsize=9, **below)
    _title(axes, "Speed-up, with tokens per second")


# A simulation


def plot_simulation(forecasts: dict[Policy, Forecast], path: Path) -> None:
    """Write a PNG, 1440 pixels wide."""
    if not forecasts:
        raise ValueError("a picture of a simulation needs at least one")
    save_figure(draw_simulation(forecasts), path, "the picture of the simulation goes there")


def draw_simulation(forecasts: dict[Policy, Forecast]) -> Figure:
    # Imported here because importing matplotlib takes longer than a simulation.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        speed, lost = figure.subplots(1, 2, width_ratios=(1.5, 1))
        _draw_speed(speed, forecasts)
        _draw_lost(lost, forecasts)
    return figure


def _draw_speed(axes: Axes, forecasts: dict[Policy, Forecast]) -> None:
    scenario = next(iter(forecasts.values())).scenario
    hours = scenario.horizon_s / 3600
    unit, scale = ("days", 86_400.0) if hours > _DAYS_FROM_H else ("hours", 3600.0)
    ideal = scenario.cluster.ideal_tokens_per_s
    axes.axhline(ideal, color=IDEAL, linestyle="--", label="undisturbed")
    for policy, forecast in forecasts.items():
        low, median, high = forecast.tokens_per_s
        middles = (forecast.edges_s[1:] + forecast.edges_s[:-1]) / 2 / scale
        axes.fill_between(middles, low, high, color=COLOURS[policy], alpha=0.2, lw=0)
        label = f"{policy}: {forecast.of_ideal.median:.1%} of it"
        axes.plot(middles, median, color=COLOURS[policy], lw=2, label=label)
    nodes = scenario.cluster.nodes
    _title(axes, f"Tokens that counted, {'1 node' if nodes == 1 else f'{nodes:,} nodes'}")
    axes.set(xlabel=unit, ylabel="tokens per second", xlim=(0, scenario.horizon_s / scale), ylim=(0, 1.3 * ideal))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left", ncols=3)
    note = "band: 5th to 95th percentile of the seeds"
    axes.annotate(note, (0.01, 0.02), xycoords="axes fraction", color=IDEAL, fontsize=9)


def _draw_lost(axes: Axes, forecasts: dict[Policy, Forecast]) -> None:
    """Draw a bar per cause and policy; the thin line is the band."""

    def share(forecast: Forecast, cause: Cause) -> float:
        return forecast.mean_s[cause] / forecast.scenario.horizon_s

    causes = [
        cause for cause in LABELS if any(abs(share(forecast, cause)) > _LEAST_SHARE for forecast in forecasts.values())
    ]
    height = 0.8 / len(forecasts)
    for number, (policy, forecast) in enumerate(forecasts.items()):
        places = [place + height * (number - (len(forecasts) - 1) / 2) for place in range(len(causes))]
        shares = [share(forecast, cause) for cause in causes]
        axes.barh(places, shares, 0.95 * height, color=COLOURS[policy])
        for place, cause, value in zip(places, causes, shares, strict=True):
            _draw_band(axes, place, value, forecast.lost_s[cause], forecast.scenario.horizon_s)
    axes.set_yticks(range(len(causes)), [LABELS[cause] for cause in causes])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axes.set_xlabel("part of the wall time")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    _title(axes, "Time lost by cause: mean, and the band")


def _draw_band(axes: Axes, place: float, share: float, band: Band, wall_s: float) -> None:
    low, high = band.low / wall_s, band.high / wall_s
    axes.plot([low, high], [place, place], color="black", lw=1, alpha=0.6)
    beside = (max(share, high), place)
    # Adding 0.0 removes the sign of what rounds to zero.
    axes.annotate(f"{round(share, 3) + 0.0:.1%}", beside, (5, 0), textcoords="offset points", va="center", fontsize=9)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=10)

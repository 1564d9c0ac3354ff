"""A plan's picture: where a step's time would go on so many nodes, and what they would gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.tools.plan.advise import Plan, PlanRow
from shoal.tools.plan.scenario import Policy
from shoal.tools.plan.simulation import Band, Cause, Forecast
from shoal.tools.report.figures import IDEAL, LOW, MEASURED, PHASE_COLOURS, PHASE_NAMES, set_log_ticks, step_unit
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


def _draw_gain(axes: Axes, rows: tuple[PlanRow, ...]) -> None:
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


# SECTION report/simulation_picture
# A simulation as a picture: tokens a second over time with their band, and the time lost by cause.


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
# Over how many hours days are the better unit.
_DAYS_FROM_H = 72.0
# What is lost less than this is not drawn.
_LEAST = 5e-4


def plot_simulation(forecasts: dict[Policy, Forecast], path: Path) -> None:
    """Writes a PNG, 1440 pixels wide."""
    if not forecasts:
        raise ValueError("a picture of a simulation needs at least one")
    figure = draw_simulation(forecasts)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {error.strerror or error}",
            why="the picture of the simulation goes there",
            fix=f"make room or permissions there: df -h {path.parent}",
        ) from None


def draw_simulation(forecasts: dict[Policy, Forecast]) -> Figure:
    # Imported here because matplotlib takes longer to import than a simulation takes to run.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
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
    for policy, found in forecasts.items():
        low, median, high = found.tokens_per_s
        middles = (found.edges_s[1:] + found.edges_s[:-1]) / 2 / scale
        colour = COLOURS[policy]
        axes.fill_between(middles, low, high, color=colour, alpha=0.2, lw=0)
        label = f"{policy}: {found.of_ideal.median:.1%} of it"
        axes.plot(middles, median, color=colour, lw=2, label=label)
    _title(axes, f"Tokens that counted, {_cluster(scenario.cluster.nodes)}")
    axes.set(xlabel=unit, ylabel="tokens per second", xlim=(0, scenario.horizon_s / scale), ylim=(0, 1.3 * ideal))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left", ncols=3)
    note = "band: 5th to 95th percentile of the seeds"
    axes.annotate(note, (0.01, 0.02), xycoords="axes fraction", color=IDEAL, fontsize=9)


def _draw_lost(axes: Axes, forecasts: dict[Policy, Forecast]) -> None:
    """A bar for each policy under each cause; the thin line is the band."""
    shown = [cause for cause in LABELS if any(abs(_share(each, cause)) > _LEAST for each in forecasts.values())]
    height = 0.8 / len(forecasts)
    for number, (policy, found) in enumerate(forecasts.items()):
        places = [place + height * (number - (len(forecasts) - 1) / 2) for place in range(len(shown))]
        shares = [_share(found, cause) for cause in shown]
        axes.barh(places, shares, 0.95 * height, color=COLOURS[policy])
        for place, cause, share in zip(places, shown, shares, strict=True):
            _draw_band(axes, place, share, found.lost_s[cause], found.scenario.horizon_s)
    axes.set_yticks(range(len(shown)), [LABELS[cause] for cause in shown])
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
    # What rounds to zero has no sign.
    axes.annotate(f"{round(share, 3) + 0.0:.1%}", beside, (5, 0), textcoords="offset points", va="center", fontsize=9)


def _share(found: Forecast, cause: Cause) -> float:
    return found.mean_s[cause] / found.scenario.horizon_s


def _cluster(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes:,} nodes"

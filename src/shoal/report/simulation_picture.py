"""A simulation as a picture: tokens a second over time with their band, and where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.simulate.forecast import Forecast
from shoal.cost.simulate.scenario import Policy
from shoal.errors import ShoalError
from shoal.report.palette import IDEAL, PHASE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "useful": "useful steps",
    "straggling": "waiting for the slowest rank",
    "reduced": "fewer nodes",
    "checkpointing": "checkpoints",
    "detection": "noticing a failure",
    "recovery": "restart or regroup",
    "redone": "steps done again",
    "waiting": "waiting for nodes",
}
COLOURS = {
    "useful": PHASE_COLOURS["backward"],
    "straggling": PHASE_COLOURS["wait"],
    "reduced": PHASE_COLOURS["forward"],
    "checkpointing": PHASE_COLOURS["optimizer"],
    "detection": "#f0e442",
    "recovery": PHASE_COLOURS["exposed"],
    "redone": PHASE_COLOURS["data"],
    "waiting": PHASE_COLOURS["other"],
}
POLICY_COLOURS: dict[Policy, str] = {"restart": PHASE_COLOURS["exposed"], "live": PHASE_COLOURS["backward"]}
# Over how many hours days are the better unit.
_DAYS_FROM_H = 72.0


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
        colour = POLICY_COLOURS[policy]
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
    """Bars to the right; a gain (negative) cannot be drawn in a stack and is left to the table."""
    names = list(forecasts)
    lefts = dict.fromkeys(names, 0.0)
    for part in LABELS:
        shares = [max(0.0, found.mean_s[part]) / found.scenario.horizon_s for found in forecasts.values()]
        if max(shares) < 5e-4:
            continue
        bars = axes.barh(names, shares, 0.55, left=list(lefts.values()), color=COLOURS[part], label=LABELS[part])
        colour = "black" if part in ("detection", "straggling") else "white"
        labels = [f"{share:.0%}" if share > 0.045 else "" for share in shares]
        axes.bar_label(bars, labels, label_type="center", color=colour, fontsize=9)
        lefts = {name: lefts[name] + share for name, share in zip(names, shares, strict=True)}
    _title(axes, "Where the time went, mean of the seeds")
    axes.set(xlabel="part of the wall time", xlim=(0, 1), ylim=(len(names) - 0.4, -0.6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=1)


def _cluster(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes:,} nodes"


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=10)

"""A simulation as a picture: tokens a second over time with their band, and the time lost by cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.simulate.forecast import Band, Forecast
from shoal.cost.simulate.ledger import Cause
from shoal.cost.simulate.scenario import Policy
from shoal.errors import ShoalError
from shoal.report.palette import IDEAL, PHASE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=10)

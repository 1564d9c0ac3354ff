"""`shoal simulate`: a training over time, with failures, stragglers and checkpoints, from a scenario file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shoal.cli.command import command
from shoal.cli.options import Option, argument
from shoal.cli.output import check_picture, print_json, print_paragraph, print_table, shown, stdout_console
from shoal.units import format_duration, format_si

# Imported inside functions: the simulator imports numpy, and `simulate --help` must answer at once.
if TYPE_CHECKING:
    from shoal.tools.plan.scenario import Policy, SimulationScenario
    from shoal.tools.plan.scenario_file import ScenarioFile
    from shoal.tools.plan.simulation import Band, Forecast

_LEAST_SHARE = 5e-5
# Below this part of the ideal a training makes no progress, and a ratio to it means nothing.
_NOWHERE = 0.02


@command(
    scenario=argument("A scenario file; docs/simulate.md has its keys."),
    out=Option("Also write a figure (PNG).", flags="--out -o"),
)
def simulate(scenario: Path, out: Path | None = None, json: bool = False) -> None:
    """Simulate a training over hours or months: failures, stragglers, checkpoints, recovery. Starts nothing.

    A scenario file has the nodes, the step, and what happens to them; each key has a default:

    nodes = 3, step_s = 2, tokens_per_step = 2048, hours = 48, mtbf_hours = 24, straggler = "lognormal:0.1".

    Instead of step_s and tokens_per_step it may have a section [plan] with options of shoal plan, such as
    preset = "gpt2-124m" and link = "wifi", which predict them for any number of nodes.
    """
    from shoal.tools.plan.scenario_file import read_scenario, simulate

    if out is not None:
        check_picture(out)
    file = read_scenario(scenario)
    forecasts = simulate(file)
    if out is not None:
        from shoal.tools.plan.figures import plot_simulation

        plot_simulation(forecasts, out)
    if json:
        print_json(as_json(forecasts, file))
    else:
        print_simulation(forecasts, file, shown(out) if out else None)


def print_simulation(forecasts: dict[Policy, Forecast], options: ScenarioFile, picture: str | None) -> None:
    console = stdout_console()
    print_paragraph(escape(_headline(forecasts, options)), console)
    console.print()
    titles = ["", *(title for policy in forecasts for title in (policy, "5–95%"))]
    # Medians with the 5th and 95th percentile.
    print_table(titles, [(label, *cells) for label, cells in _rows(forecasts)], range(1, len(titles)), console)
    console.print()
    for line in _verdicts(forecasts):
        print_paragraph(escape(line), console)
    if picture is not None:
        console.print(f"picture: {escape(picture)}", soft_wrap=True)


def _headline(forecasts: dict[Policy, Forecast], options: ScenarioFile) -> str:
    scenario = next(iter(forecasts.values())).scenario
    cluster = scenario.cluster
    ranks = f" × {cluster.ranks_per_node} ranks" if cluster.ranks_per_node > 1 else ""
    return (
        f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''}{ranks}, {options.hours:g} h, {options.seeds} seeds; "
        f"a step of {format_duration(cluster.step_s(cluster.nodes))}; "
        f"{_describe_failures(scenario)}; {_describe_checkpoints(scenario)}"
    )


def _verdicts(forecasts: dict[Policy, Forecast]) -> list[str]:
    lines = [_largest_loss(policy, forecast) for policy, forecast in forecasts.items()]
    if {"restart", "live"} <= forecasts.keys():
        restart, live = forecasts["restart"], forecasts["live"]
        if restart.of_ideal.median < _NOWHERE:
            lines.append("restarting makes no progress here: nodes fail before the next checkpoint is written")
        else:
            ratio = live.tokens.median / restart.tokens.median
            lines.append(f"regrouping live trains {ratio:.2f}× as many tokens as restarting")
    return lines


def as_json(forecasts: dict[Policy, Forecast], options: ScenarioFile) -> dict[str, Any]:
    scenario = next(iter(forecasts.values())).scenario
    cluster = scenario.cluster
    given = {name: _finite(value) for name, value in vars(options).items() if not callable(value)}
    return {
        "options": given,
        "step_s": cluster.step_s(cluster.nodes),
        "ideal_tokens_per_s": cluster.ideal_tokens_per_s,
        "checkpoint_every": scenario.checkpoints.every,
        "cluster_mtbf_s": _finite(scenario.failures.mtbf_s / cluster.nodes),
        "policies": {policy: _forecast_document(forecast) for policy, forecast in forecasts.items()},
    }


def _forecast_document(forecast: Forecast) -> dict[str, Any]:
    low, median, high = (curve.tolist() for curve in forecast.tokens_per_s)
    return {
        "goodput": vars(forecast.goodput),
        "of_ideal": vars(forecast.of_ideal),
        "tokens": vars(forecast.tokens),
        "failures": vars(forecast.failures),
        "lost_s": {cause: vars(band) for cause, band in forecast.lost_s.items()},
        "mean_s": forecast.mean_s,
        "curve": {"edges_s": forecast.edges_s.tolist(), "low": low, "median": median, "high": high},
    }


def _rows(forecasts: dict[Policy, Forecast]) -> list[tuple[str, list[str]]]:
    from shoal.tools.plan.figures import LABELS
    from shoal.tools.plan.simulation import CAUSES

    values = list(forecasts.values())
    speeds = [_scaled(forecast.of_ideal, forecast.scenario.cluster.ideal_tokens_per_s) for forecast in values]
    rows = [
        ("tokens/s", _cells(speeds, _rate)),
        ("of an undisturbed cluster", _cells([forecast.of_ideal for forecast in values], _percent)),
        ("goodput (time in steps that counted)", _cells([forecast.goodput for forecast in values], _percent)),
        ("failures", _cells([forecast.failures for forecast in values], lambda count: f"{count:,.0f}")),
    ]
    for cause in CAUSES:
        shares = [_scaled(forecast.lost_s[cause], 1 / forecast.scenario.horizon_s) for forecast in values]
        if any(abs(share.high) >= _LEAST_SHARE or abs(share.low) >= _LEAST_SHARE for share in shares):
            # Fewer nodes can be faster where the network is the limit.
            gains = " (below 0: gained)" if any(share.low <= -_LEAST_SHARE for share in shares) else ""
            rows.append((f"lost: {LABELS[cause]}{gains}", _cells(shares, _percent)))
    return rows


def _cells(bands: list[Band], form: Callable[[float], str]) -> list[str]:
    return [cell for band in bands for cell in (form(band.median), f"{form(band.low)} – {form(band.high)}")]


def _largest_loss(policy: Policy, forecast: Forecast) -> str:
    """Name the largest loss.

    Use means over the seeds, because only means add up: the medians of a part and of the whole may be of two seeds. A
    cause that gains time (fewer nodes where the network is the limit) is not a loss and is named separately.
    """
    from shoal.tools.plan.figures import LABELS
    from shoal.tools.plan.simulation import CAUSES

    shares = {cause: forecast.mean_s[cause] / forecast.scenario.horizon_s for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: shares[name])
    lost = sum(max(share, 0.0) for share in shares.values())
    if shares[cause] < _LEAST_SHARE:
        return f"{policy}: nothing is lost"
    part = "most of it" if shares[cause] > lost / 2 else "the largest part"
    text = f"{policy}: {_percent(lost)} is lost on average, {part} to {LABELS[cause]} ({_percent(shares[cause])})"
    gained = {name: -share for name, share in shares.items() if share <= -_LEAST_SHARE}
    return text + "".join(f"; {LABELS[name]}: {_percent(share)} gained" for name, share in gained.items())


def _describe_failures(scenario: SimulationScenario) -> str:
    if _finite(scenario.failures.mtbf_s) is None:
        failures = "no failures"
    else:
        failures = f"a failure about every {format_duration(scenario.failures.mtbf_s / scenario.cluster.nodes)}"
    from shoal.tools.plan.scenario import Slowest

    ranks = scenario.cluster.nodes * scenario.cluster.ranks_per_node
    slowest = Slowest(scenario.straggling, ranks).mean
    return failures if slowest == 1 else f"{failures}; the slowest of {ranks:,} ranks takes {slowest:.2f}×"


def _describe_checkpoints(scenario: SimulationScenario) -> str:
    every = scenario.checkpoints.every
    if every is None:
        return "no checkpoints"
    seconds = every * scenario.cluster.step_s(scenario.cluster.nodes)
    hidden = "hidden " if scenario.checkpoints.hidden else ""
    return f"{hidden}checkpoints every {every:,} steps ({format_duration(seconds)})"


def _scaled(band: Band, factor: float) -> Band:
    return replace(band, low=band.low * factor, median=band.median * factor, high=band.high * factor)


def _percent(share: float) -> str:
    """Format a share with two decimals below 10%, else one; what rounds to zero has no sign."""
    text = f"{share:.2%}" if abs(share) < 0.1 else f"{share:.1%}"
    return text.removeprefix("-") if float(text[:-1]) == 0 else text


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s < 1e6 else format_si(tokens_per_s)


def _finite(value: Any) -> Any:
    """Return None for infinity, which JSON does not have."""
    return None if value == math.inf else value

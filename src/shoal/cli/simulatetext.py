"""A simulation as a table for people and as a document for scripts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal.cli.output import stdout_console
from shoal.cli.simulateoptions import SimulateOptions
from shoal.cost.simulate.forecast import Band, Forecast
from shoal.cost.simulate.ledger import CAUSES
from shoal.cost.simulate.scenario import Policy, Scenario
from shoal.cost.simulate.straggling import Slowest
from shoal.report.simulation_picture import LABELS
from shoal.units import format_duration, format_si

_LEAST_SHARE = 5e-5
_LEAST_WIDTH = 100
# Below this part of the ideal a training gets nowhere, whatever the ratio to another that does too.
_NOWHERE = 0.02


def print_simulation(forecasts: dict[Policy, Forecast], options: SimulateOptions, picture: str | None) -> None:
    console = stdout_console()
    # The table breaks its lines on a narrow terminal, rather than lose its figures.
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(escape(headline(forecasts, options)), soft_wrap=True)
    console.print()
    console.print(table(forecasts))
    console.print()
    for line in verdicts(forecasts):
        console.print(escape(line), soft_wrap=True)
    if picture is not None:
        console.print(f"picture: {escape(picture)}", soft_wrap=True)


def headline(forecasts: dict[Policy, Forecast], options: SimulateOptions) -> str:
    scenario = next(iter(forecasts.values())).scenario
    cluster = scenario.cluster
    ranks = f" × {cluster.ranks_per_node} ranks" if cluster.ranks_per_node > 1 else ""
    return (
        f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''}{ranks}, {options.hours:g} h, {options.seeds} seeds; "
        f"a step of {format_duration(cluster.step_s(cluster.nodes))}; {_failing(scenario)}; {_saving(scenario)}"
    )


def table(forecasts: dict[Policy, Forecast]) -> Table:
    """Medians, with the 5th and 95th percentile."""
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    found.add_column("", no_wrap=True)
    for policy in forecasts:
        found.add_column(policy, justify="right", no_wrap=True)
        found.add_column("5–95%", justify="right", no_wrap=True)
    for label, cells in _rows(forecasts):
        found.add_row(label, *cells)
    return found


def verdicts(forecasts: dict[Policy, Forecast]) -> list[str]:
    lines = [_why(policy, found) for policy, found in forecasts.items()]
    if {"restart", "live"} <= forecasts.keys():
        restart, live = forecasts["restart"], forecasts["live"]
        if restart.of_ideal.median < _NOWHERE:
            lines.append("restarting makes no progress here: failures come before the next checkpoint is written")
        else:
            ratio = live.tokens.median / restart.tokens.median
            lines.append(f"regrouping live trains {ratio:.2f}× as many tokens as restarting")
    return lines


def as_json(forecasts: dict[Policy, Forecast], options: SimulateOptions) -> dict[str, Any]:
    scenario = next(iter(forecasts.values())).scenario
    cluster = scenario.cluster
    asked = {name: _finite(value) for name, value in vars(options).items() if not callable(value)}
    return {
        "options": asked,
        "step_s": cluster.step_s(cluster.nodes),
        "ideal_tokens_per_s": cluster.ideal_tokens_per_s,
        "checkpoint_every": scenario.checkpoints.every,
        "cluster_mtbf_s": _finite(scenario.failures.mtbf_s / cluster.nodes),
        "policies": {policy: _document(found) for policy, found in forecasts.items()},
    }


def _document(found: Forecast) -> dict[str, Any]:
    low, median, high = (curve.tolist() for curve in found.tokens_per_s)
    return {
        "goodput": vars(found.goodput),
        "of_ideal": vars(found.of_ideal),
        "tokens": vars(found.tokens),
        "failures": vars(found.failures),
        "lost_s": {cause: vars(each) for cause, each in found.lost_s.items()},
        "mean_s": found.mean_s,
        "curve": {"edges_s": found.edges_s.tolist(), "low": low, "median": median, "high": high},
    }


def _rows(forecasts: dict[Policy, Forecast]) -> list[tuple[str, list[str]]]:
    every = list(forecasts.values())
    rows = [
        ("tokens/s", _cells([_scaled(each.of_ideal, _ideal(each)) for each in every], _rate)),
        ("of an undisturbed cluster", _cells([each.of_ideal for each in every], _per_cent)),
        ("goodput (time in steps that counted)", _cells([each.goodput for each in every], _per_cent)),
        ("failures", _cells([each.failures for each in every], lambda count: f"{count:,.0f}")),
    ]
    for cause in CAUSES:
        shares = [_scaled(each.lost_s[cause], 1 / each.scenario.horizon_s) for each in every]
        if any(abs(share.high) >= _LEAST_SHARE or abs(share.low) >= _LEAST_SHARE for share in shares):
            # Fewer nodes gain time where the network is the limit.
            gains = " (below 0: gained)" if any(share.low <= -_LEAST_SHARE for share in shares) else ""
            rows.append((f"lost: {LABELS[cause]}{gains}", _cells(shares, _per_cent)))
    return rows


def _cells(bands: list[Band], form: Callable[[float], str]) -> list[str]:
    return [cell for band in bands for cell in (form(band.median), f"{form(band.low)} – {form(band.high)}")]


def _why(policy: Policy, found: Forecast) -> str:
    """The largest loss by name. Means over the seeds, because only they add up: medians of a part and of the whole are
    of two seeds. A cause that gains time (fewer nodes where the network is the limit) is no loss and named apart."""
    shares = {cause: found.mean_s[cause] / found.scenario.horizon_s for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: shares[name])
    lost = sum(max(share, 0.0) for share in shares.values())
    if shares[cause] < _LEAST_SHARE:
        return f"{policy}: nothing is lost"
    part = "most of it" if shares[cause] > lost / 2 else "the largest part"
    text = f"{policy}: {_per_cent(lost)} is lost on average, {part} to {LABELS[cause]} ({_per_cent(shares[cause])})"
    gained = {name: -share for name, share in shares.items() if share <= -_LEAST_SHARE}
    return text + "".join(f"; {LABELS[name]}: {_per_cent(share)} gained" for name, share in gained.items())


def _failing(scenario: Scenario) -> str:
    if _finite(scenario.failures.mtbf_s) is None:
        failing = "no failures"
    else:
        failing = f"a failure about every {format_duration(scenario.failures.mtbf_s / scenario.cluster.nodes)}"
    ranks = scenario.cluster.nodes * scenario.cluster.ranks_per_node
    slowest = Slowest(scenario.straggling, ranks).mean
    return failing if slowest == 1 else f"{failing}; the slowest of {ranks:,} ranks takes {slowest:.2f}×"


def _saving(scenario: Scenario) -> str:
    every = scenario.checkpoints.every
    if every is None:
        return "no checkpoints"
    seconds = every * scenario.cluster.step_s(scenario.cluster.nodes)
    hidden = "hidden " if scenario.checkpoints.hidden else ""
    return f"{hidden}checkpoints every {every:,} steps ({format_duration(seconds)})"


def _scaled(band: Band, factor: float) -> Band:
    return Band(band.low * factor, band.median * factor, band.high * factor)


def _ideal(found: Forecast) -> float:
    return found.scenario.cluster.ideal_tokens_per_s


def _per_cent(share: float) -> str:
    """Two digits behind the point below 10%; what rounds to zero has no sign."""
    text = f"{share:.2%}" if abs(share) < 0.1 else f"{share:.1%}"
    return text.removeprefix("-") if float(text[:-1]) == 0 else text


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s < 1e6 else format_si(tokens_per_s)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return None if value == math.inf else value

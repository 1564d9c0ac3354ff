"""`shoal plan --simulate`: turn options into scenarios, simulate them, and print or draw the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from shoal.cli.output import print_json, print_paragraph, print_table, shown, stdout_console
from shoal.errors import ConfigError, DataError
from shoal.run_folder import RunFolder
from shoal.units import format_duration, format_si

# Imported inside functions: the simulator imports numpy and matplotlib, and `plan --help` must answer at once.
if TYPE_CHECKING:
    from shoal.tools.plan.scenario import (
        Checkpoints,
        Failures,
        Policy,
        Scaling,
        SimulatedCluster,
        SimulationScenario,
        StepTime,
        Straggling,
    )
    from shoal.tools.plan.simulation import Band, Forecast

_POLICIES: dict[str, tuple[Policy, ...]] = {
    "both": ("restart", "live"),
    "restart": ("restart",),
    "live": ("live",),
}
_LEAST_SHARE = 5e-5
# Below this part of the ideal a training makes no progress, and a ratio to it means nothing.
_NOWHERE = 0.02
_PANEL = "Simulation (--simulate)"


def _option(flag: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(flag, help=text, rich_help_panel=_PANEL)
    return option


# `plan` declares its options with these annotations and passes the values on as `SimulateOptions`.
Simulate = Annotated[
    bool, _option("--simulate", "Simulate training over time, with stragglers, failures and recovery.")
]
Hours = Annotated[float, _option("--hours", "Simulated hours of training.")]
StepS = Annotated[float | None, _option("--step-s", "Seconds of an undisturbed step; default: the plan's.")]
TokensPerStep = Annotated[float | None, _option("--tokens-per-step", "Tokens per step; default: the plan's.")]
MtbfHours = Annotated[float, _option("--mtbf-hours", "Mean time between failures of one node, in hours; inf: never.")]
AllShare = Annotated[
    float, _option("--all-share", "Part of the failures that stop every node, such as a switch failure.")
]
RecoveryKind = Annotated[
    str, _option("--recovery", "restart: from a checkpoint, as torchrun does; live: survivors regroup; or both.")
]
CheckpointEvery = Annotated[
    str, _option("--checkpoint-every", "Steps between checkpoints; best: by Young and Daly's formula; never.")
]
CheckpointS = Annotated[float, _option("--checkpoint-s", "Seconds a checkpoint takes.")]
HiddenCheckpoints = Annotated[
    bool, _option("--hidden-checkpoints", "Checkpoints are written while training continues.")
]
DetectS = Annotated[float, _option("--detect-s", "Seconds until a lost node is detected.")]
RestartS = Annotated[float, _option("--restart-s", "Seconds from then to the next step, if all ranks are restarted.")]
RegroupS = Annotated[float, _option("--regroup-s", "Seconds from then to the next step, if survivors regroup.")]
RejoinS = Annotated[float, _option("--rejoin-s", "Seconds that all nodes wait while a joining node copies the state.")]
RepairMinutes = Annotated[float, _option("--repair-minutes", "Minutes until a lost node is back.")]
Straggler = Annotated[
    str, _option("--straggler", "Spread of step times: none, lognormal:SIGMA, or a run folder to fit it to.")
]
MinNodes = Annotated[int, _option("--min-nodes", "With fewer nodes than this, training waits.")]
Spares = Annotated[int, _option("--spares", "Standby nodes that replace lost ones.")]
Seeds = Annotated[int, _option("--seeds", "Number of simulated trainings; percentiles are taken over them.")]
Seed = Annotated[int, _option("--seed", "The same seed gives the same figures.")]


@dataclass(frozen=True)
class SimulateOptions:
    nodes: int
    step_s: float | StepTime  # a number, or the plan's prediction by number of nodes
    tokens_per_step: float
    hours: float = 24.0
    ranks_per_node: int = 1
    scaling: str = "strong"
    # Meta's research cluster: a failure every 7.9 h on 128 nodes (arXiv 2410.21680). Laptops that sleep fail far more.
    mtbf_hours: float = 1000.0
    all_share: float = 0.0
    recovery: str = "both"
    checkpoint_every: str = "best"
    # 124M parameters and their moments are 1.5 GB; SHA-256 alone takes 1.4 s for 496 MB on one core.
    checkpoint_s: float = 5.0
    hidden_checkpoints: bool = False
    # A run that cannot continue ends after 20 s without a heartbeat; one that can continue reacts after 2.5 s.
    detect_s: float = 20.0
    # torchrun took 82 s from a killed node to the next step, detection included (three emulated nodes, torch 2.13).
    restart_s: float = 62.0
    # From the kill of a rank to the survivors' next step with DDP wrapped again: 0.5 s (three ranks, torch 2.13).
    regroup_s: float = 0.5
    # The same 1.5 GB over gloo at 0.95 Gbit/s.
    rejoin_s: float = 12.5
    # An assumption: a machine reboots, or its user restarts it.
    repair_minutes: float = 10.0
    straggler: str = "none"
    min_nodes: int = 1
    spares: int = 0
    seeds: int = 20
    seed: int = 0


def run_simulation(options: SimulateOptions, json: bool, picture: Path | None) -> None:
    forecasts = simulate(options)
    if picture is not None:
        from shoal.tools.plan.figures import plot_simulation

        plot_simulation(forecasts, picture)

    if json:
        print_json(as_json(forecasts, options))
        return
    print_simulation(forecasts, options, shown(picture) if picture else None)


def simulate(options: SimulateOptions) -> dict[Policy, Forecast]:
    """Return the forecasts by policy, in the order they are shown."""
    from shoal.tools.plan.simulation import simulate as forecast

    return {policy: forecast(scenario, options.seeds, options.seed) for policy, scenario in scenarios(options).items()}


def scenarios(options: SimulateOptions) -> dict[Policy, SimulationScenario]:
    from shoal.tools.plan.scenario import Failures, RecoveryModel, SimulationScenario

    if options.recovery not in _POLICIES:
        raise ConfigError(
            f"--recovery {options.recovery!r} is not restart, live or both",
            why="restart goes back to the last checkpoint; with live the survivors continue",
            fix="use --recovery both to compare them",
        )
    straggling, cluster = _straggling(options.straggler), _cluster(options)
    failures = Failures(3600 * options.mtbf_hours, options.all_share)
    checkpoints = _checkpoints(options, cluster, failures, straggling)
    times = (options.detect_s, options.restart_s, options.regroup_s, options.rejoin_s, 60 * options.repair_minutes)
    return {
        policy: SimulationScenario(
            cluster, failures, RecoveryModel(policy, *times), checkpoints, 3600 * options.hours, straggling
        )
        for policy in _POLICIES[options.recovery]
    }


def _cluster(options: SimulateOptions) -> SimulatedCluster:
    from shoal.tools.plan.scenario import SimulatedCluster

    return SimulatedCluster(
        nodes=options.nodes,
        step_s=_step_time(options, _scaling(options.scaling)),
        tokens_per_step=options.tokens_per_step,
        ranks_per_node=options.ranks_per_node,
        scaling=_scaling(options.scaling),
        min_nodes=options.min_nodes,
        spares=options.spares,
    )


def _step_time(options: SimulateOptions, scaling: Scaling) -> StepTime:
    from shoal.tools.plan.scenario import divided_work

    if callable(options.step_s):
        return options.step_s
    return divided_work(options.step_s, options.nodes, scaling)


def _scaling(text: str) -> Scaling:
    if text not in ("strong", "weak"):
        raise ConfigError(
            f"--scaling {text!r} is neither strong nor weak",
            why="strong keeps the global batch when nodes are lost, weak the batch of each node",
            fix="use --scaling strong",
        )
    return "weak" if text == "weak" else "strong"


def _checkpoints(
    options: SimulateOptions, cluster: SimulatedCluster, failures: Failures, straggling: Straggling
) -> Checkpoints:
    from shoal.tools.plan.scenario import Checkpoints
    from shoal.tools.plan.simulation import best_every

    text = options.checkpoint_every
    if text == "never":
        return Checkpoints(None, options.checkpoint_s)
    if text == "best":
        template = Checkpoints(1, options.checkpoint_s, options.hidden_checkpoints)
        every = best_every(cluster, failures, straggling, template)
    elif text.isdecimal():
        every = int(text)
    else:
        raise ConfigError(
            f"--checkpoint-every {text!r} is not a number of steps",
            why="it is a number above zero, `best` (Young and Daly's formula) or `never`",
            fix="use --checkpoint-every best",
        )
    return Checkpoints(every, options.checkpoint_s, options.hidden_checkpoints)


def _straggling(text: str) -> Straggling:
    from shoal.tools.plan.scenario import Lognormal, Steady

    if text == "none":
        return Steady()
    kind, _, value = text.partition(":")
    if kind != "lognormal":
        return _fitted(Path(text))
    try:
        return Lognormal(float(value))
    except ValueError:
        raise ConfigError(
            f"--straggler {text!r} states no spread",
            why="SIGMA is the spread of the logarithm of a rank's step time: 0.02 is quiet, 0.3 is bad",
            fix="write for example: --straggler lognormal:0.05",
        ) from None


def _fitted(folder: Path) -> Straggling:
    from shoal.records.rank_log import step_time_factors
    from shoal.tools.plan.scenario import fit_stragglers

    try:
        run = RunFolder.open(folder)
    except DataError as error:
        raise ConfigError(
            f"--straggler {str(folder)!r} is neither none, lognormal:SIGMA nor a run folder",
            why=error.seen,
            fix="write for example: --straggler lognormal:0.05, or name a folder of: shoal runs",
        ) from None
    return fit_stragglers(step_time_factors(run.read_all_events()))


def print_simulation(forecasts: dict[Policy, Forecast], options: SimulateOptions, picture: str | None) -> None:
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


def _headline(forecasts: dict[Policy, Forecast], options: SimulateOptions) -> str:
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


def as_json(forecasts: dict[Policy, Forecast], options: SimulateOptions) -> dict[str, Any]:
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
    cause that gains time (fewer nodes where the network is the limit) is no loss and is named separately.
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

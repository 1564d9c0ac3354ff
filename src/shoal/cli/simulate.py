"""`shoal plan --simulate`: from options to scenarios, simulated, drawn and printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.output import print_json, shown, stdout_console
from shoal.errors import ConfigError, DataError
from shoal.run_folder import RunFolder
from shoal.tools.plan.figures import LABELS
from shoal.tools.plan.scenario import Policy, SimulationScenario, Slowest
from shoal.tools.plan.simulation import CAUSES, Band, Forecast
from shoal.units import format_duration, format_si

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
    from shoal.tools.plan.simulation import Forecast


# SECTION cli/simulateoptions
# The knobs of `shoal plan --simulate`: what each is called, what it means, and where its default comes from.
#
# `plan` declares its options with the annotations below and hands the values over as `SimulateOptions`.


_PANEL = "Simulation (--simulate)"


def _option(flag: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(flag, help=text, rich_help_panel=_PANEL)
    return found


Simulate = Annotated[bool, _option("--simulate", "Simulate training over time: stragglers, failures, recovery.")]
Hours = Annotated[float, _option("--hours", "How long to train, in simulated hours.")]
RanksPerNode = Annotated[int, _option("--ranks-per-node", "Ranks on each node; the slowest of all ends a step.")]
StepS = Annotated[float | None, _option("--step-s", "Seconds an undisturbed step takes; otherwise as planned.")]
TokensPerStep = Annotated[float | None, _option("--tokens-per-step", "Tokens in a step; otherwise as planned.")]
MtbfHours = Annotated[float, _option("--mtbf-hours", "Mean time between failures of one node; inf: never.")]
AllShare = Annotated[float, _option("--all-share", "Part of the failures that stop every node, such as a switch's.")]
RecoveryKind = Annotated[
    str, _option("--recovery", "restart from a checkpoint as torchrun does, live: regroup without, or both.")
]
CheckpointEvery = Annotated[
    str, _option("--checkpoint-every", "Steps between checkpoints; best: by Young and Daly; never.")
]
CheckpointS = Annotated[float, _option("--checkpoint-s", "Seconds a checkpoint takes.")]
HiddenCheckpoints = Annotated[bool, _option("--hidden-checkpoints", "Checkpoints are written while training goes on.")]
DetectS = Annotated[float, _option("--detect-s", "Seconds until a lost node is noticed.")]
RestartS = Annotated[float, _option("--restart-s", "Seconds from then to the next step, when everybody is restarted.")]
RegroupS = Annotated[float, _option("--regroup-s", "Seconds from then to the next step, when survivors regroup.")]
RejoinS = Annotated[float, _option("--rejoin-s", "Seconds that all wait while a node that joins copies the state.")]
RepairMinutes = Annotated[float, _option("--repair-minutes", "Minutes until a lost node is back.")]
Straggler = Annotated[
    str, _option("--straggler", "none, lognormal:SIGMA, or a run folder to fit the spread of its steps to.")
]
MinNodes = Annotated[int, _option("--min-nodes", "With fewer nodes than this everybody waits.")]
Spares = Annotated[int, _option("--spares", "Nodes that stand by and take the place of lost ones.")]
Seeds = Annotated[int, _option("--seeds", "How many trainings are simulated; the bands are over them.")]
Seed = Annotated[int, _option("--seed", "The same seed gives the same figures.")]


@dataclass(frozen=True)
class SimulateOptions:
    """`step_s` may be a number, or plan's own prediction by number of nodes."""

    nodes: int
    step_s: float | StepTime
    tokens_per_step: float
    hours: float = 24.0
    ranks_per_node: int = 1
    scaling: str = "strong"
    # Meta's research cluster: a failure every 7.9 h on 128 nodes (arXiv 2410.21680). Laptops that sleep do far worse.
    mtbf_hours: float = 1000.0
    all_share: float = 0.0
    recovery: str = "both"
    checkpoint_every: str = "best"
    # 124M parameters and their moments are 1.5 GB; SHA-256 alone takes 1.4 s for 496 MB on one core.
    checkpoint_s: float = 5.0
    hidden_checkpoints: bool = False
    # After 20 s without a sign of life a run that cannot go on is ended; one that can notices after 2.5 s.
    detect_s: float = 20.0
    # torchrun took 82 s from a killed node to the next step, noticing included (three emulated nodes, torch 2.13).
    restart_s: float = 62.0
    # Kill of a rank to the survivors' next step with DDP wrapped again: 0.5 s (three ranks, torch 2.13).
    regroup_s: float = 0.5
    # The same 1.5 GB over gloo at 0.95 Gbit/s.
    rejoin_s: float = 12.5
    # A machine that reboots, or somebody who walks over: an assumption.
    repair_minutes: float = 10.0
    straggler: str = "none"
    min_nodes: int = 1
    spares: int = 0
    seeds: int = 20
    seed: int = 0


# SECTION cli/simulatetext
# A simulation as a table for people and as a document for scripts.


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


def _failing(scenario: SimulationScenario) -> str:
    if _finite(scenario.failures.mtbf_s) is None:
        failing = "no failures"
    else:
        failing = f"a failure about every {format_duration(scenario.failures.mtbf_s / scenario.cluster.nodes)}"
    ranks = scenario.cluster.nodes * scenario.cluster.ranks_per_node
    slowest = Slowest(scenario.straggling, ranks).mean
    return failing if slowest == 1 else f"{failing}; the slowest of {ranks:,} ranks takes {slowest:.2f}×"


def _saving(scenario: SimulationScenario) -> str:
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


__all__ = ["PICTURE", "SimulateOptions", "run_simulation", "scenarios", "simulate"]

PICTURE = "simulation.png"
_POLICIES: dict[str, tuple[Policy, ...]] = {
    "both": ("restart", "live"),
    "restart": ("restart",),
    "live": ("live",),
}


def run_simulation(options: SimulateOptions, json: bool, picture: Path | None) -> None:
    """Everything that `shoal plan --simulate` does."""
    forecasts = simulate(options)
    if picture is not None:
        from shoal.tools.plan.figures import plot_simulation

        plot_simulation(forecasts, picture)

    if json:
        print_json(as_json(forecasts, options))
        return
    print_simulation(forecasts, options, shown(picture) if picture else None)


def simulate(options: SimulateOptions) -> dict[Policy, Forecast]:
    """By policy, in the order they are shown."""
    from shoal.tools.plan.simulation import simulate as forecast

    return {policy: forecast(scenario, options.seeds, options.seed) for policy, scenario in scenarios(options).items()}


def scenarios(options: SimulateOptions) -> dict[Policy, SimulationScenario]:
    from shoal.tools.plan.scenario import Failures, RecoveryModel, SimulationScenario

    if options.recovery not in _POLICIES:
        raise ConfigError(
            f"--recovery {options.recovery!r} is none of restart, live and both",
            why="restart goes back to the last checkpoint, live lets the survivors go on",
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
        asked = Checkpoints(1, options.checkpoint_s, options.hidden_checkpoints)
        every = best_every(cluster, failures, straggling, asked)
    elif text.isdecimal():
        every = int(text)
    else:
        raise ConfigError(
            f"--checkpoint-every {text!r} is no number of steps",
            why="it is a number above zero, `best` (by Young and Daly) or `never`",
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
    from shoal.tools.plan.scenario import fit
    from shoal.tools.report.rank_log import step_time_factors

    try:
        run = RunFolder.open(folder)
    except DataError as error:
        raise ConfigError(
            f"--straggler {str(folder)!r} is neither none, lognormal:SIGMA nor a run folder",
            why=error.seen,
            fix="write for example: --straggler lognormal:0.05, or name a folder of: ls runs/",
        ) from None
    return fit(step_time_factors(run.read_all_events()))

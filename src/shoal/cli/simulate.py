"""`shoal plan --simulate`: from options to scenarios, simulated, drawn and printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.output import print_json, shown
from shoal.cli.simulateoptions import SimulateOptions
from shoal.errors import ConfigError, DataError
from shoal.runfolder import RunFolder

if TYPE_CHECKING:
    from shoal.cost.simulate.forecast import Forecast
    from shoal.cost.simulate.scenario import Checkpoints, Cluster, Failures, Policy, Scaling, Scenario, StepTime
    from shoal.cost.simulate.straggling import Straggling

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
        from shoal.report.simulation_picture import plot_simulation

        plot_simulation(forecasts, picture)
    from shoal.cli.simulatetext import as_json, print_simulation

    if json:
        print_json(as_json(forecasts, options))
        return
    print_simulation(forecasts, options, shown(picture) if picture else None)


def simulate(options: SimulateOptions) -> dict[Policy, Forecast]:
    """By policy, in the order they are shown."""
    from shoal.cost.simulate.forecast import simulate as forecast

    return {policy: forecast(scenario, options.seeds, options.seed) for policy, scenario in scenarios(options).items()}


def scenarios(options: SimulateOptions) -> dict[Policy, Scenario]:
    from shoal.cost.simulate.scenario import Failures, Recovery, Scenario

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
        policy: Scenario(cluster, failures, Recovery(policy, *times), checkpoints, 3600 * options.hours, straggling)
        for policy in _POLICIES[options.recovery]
    }


def _cluster(options: SimulateOptions) -> Cluster:
    from shoal.cost.simulate.scenario import Cluster

    return Cluster(
        nodes=options.nodes,
        step_s=_step_time(options, _scaling(options.scaling)),
        tokens_per_step=options.tokens_per_step,
        ranks_per_node=options.ranks_per_node,
        scaling=_scaling(options.scaling),
        min_nodes=options.min_nodes,
        spares=options.spares,
    )


def _step_time(options: SimulateOptions, scaling: Scaling) -> StepTime:
    from shoal.cost.simulate.scenario import divided_work

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


def _checkpoints(options: SimulateOptions, cluster: Cluster, failures: Failures, straggling: Straggling) -> Checkpoints:
    from shoal.cost.simulate.interval import best_every
    from shoal.cost.simulate.scenario import Checkpoints

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
    from shoal.cost.simulate.straggling import Lognormal, Steady

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
    from shoal.cost.simulate.straggling import fit
    from shoal.report.straggling import own_factors

    try:
        run = RunFolder.open(folder)
    except DataError as error:
        raise ConfigError(
            f"--straggler {str(folder)!r} is neither none, lognormal:SIGMA nor a run folder",
            why=error.seen,
            fix="write for example: --straggler lognormal:0.05, or name a folder of: ls runs/",
        ) from None
    return fit(own_factors(run.read_all_events()))

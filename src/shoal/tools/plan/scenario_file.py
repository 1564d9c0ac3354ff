"""The scenario file of `shoal simulate`: read and checked, and turned into what is simulated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from shoal.config.load import read_toml
from shoal.config.presets import did_you_mean
from shoal.cost.predict import Prediction, predict
from shoal.errors import ConfigError, DataError
from shoal.records.rank_log import step_time_factors
from shoal.run_folder import RunFolder
from shoal.tools.plan.request import (
    MOST_NODES,
    PlanRequest,
    make_basis,
    on_devices,
    parse_nodes,
    refuse_conflicts,
    what_to_plan,
)
from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    Lognormal,
    Policy,
    RecoveryModel,
    Scaling,
    SimulatedCluster,
    SimulationScenario,
    Steady,
    StepTime,
    Straggling,
    divided_work,
    fit_stragglers,
)
from shoal.tools.plan.simulation import Forecast, best_every
from shoal.tools.plan.simulation import simulate as simulate_scenario

Model = TypeVar("Model")

_POLICIES: dict[str, tuple[Policy, ...]] = {
    "both": ("restart", "live"),
    "restart": ("restart",),
    "live": ("live",),
}
# Keys that have no effect beside another, with its value.
_WITHOUT_EFFECT = {
    ("checkpoint_every", "never"): ("checkpoint_s", "hidden_checkpoints"),
    ("recovery", "restart"): ("regroup_s", "rejoin_s"),
}
# Keys of a plan that the scenario has itself, and one that only its printed command uses.
_NOT_IN_PLAN = ("ranks_per_node", "scaling", "on")


@dataclass(frozen=True)
class ScenarioFile:
    """The keys of a scenario file; those of the nodes and the step may come from its section [plan]."""

    nodes: int
    step_s: float | StepTime  # a number, or the plan's prediction by number of nodes
    tokens_per_step: float
    hours: float = 24.0
    ranks_per_node: int = 1
    scaling: Scaling = "strong"
    # Meta's research cluster: a failure every 7.9 h on 128 nodes (arXiv 2410.21680). Laptops that sleep fail far more.
    mtbf_hours: float = 1000.0
    all_share: float = 0.0
    recovery: Literal["both", "restart", "live"] = "both"
    checkpoint_every: int | str = "best"
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


def read_scenario(path: Path) -> ScenarioFile:
    """Return the scenario of a file. Where it does not state the step, the plan of its section [plan] predicts it."""
    document = read_toml(path)
    plan = document.pop("plan", None)
    _refuse_unknown(path, document, [one.name for one in fields(ScenarioFile)], "")
    for (key, value), others in _WITHOUT_EFFECT.items():
        for other in others:
            if document.get(key) == value and other in document:
                raise ConfigError(
                    f"{other} has no effect with {key} = {value!r}", why=f"see {path}", fix="leave one of them out"
                )
    # Before the plan, which needs usable numbers.
    _cluster(_validate(path, ScenarioFile, {"nodes": MOST_NODES, "step_s": 1.0, "tokens_per_step": 1.0} | document, ""))
    if plan is not None or not {"nodes", "step_s", "tokens_per_step"} <= document.keys():
        document = _planned(path, {} if plan is None else plan, document) | document
    return _validate(path, ScenarioFile, document, "")


def _planned(path: Path, table: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Return nodes, step time and tokens as `shoal plan` predicts them."""
    if not isinstance(table, dict):
        raise ConfigError(f"plan in {path} is a section, not a value", fix="write [plan] and its keys below")
    names = {one.name.rstrip("_"): one.name for one in fields(PlanRequest) if one.name not in _NOT_IN_PLAN}
    names["preset"] = names.pop("presets")
    if "preset" in table:
        table = {**table, "preset": [table["preset"]]}
    _refuse_unknown(path, table, list(names), "plan.")
    shared = {name: document[name] for name in ("ranks_per_node", "scaling") if name in document}
    request = _validate(path, PlanRequest, {names[key]: value for key, value in table.items()} | shared, "plan.")
    refuse_conflicts({}, request)
    basis = make_basis(request)
    nodes = document.get("nodes", max(parse_nodes(basis.nodes)))
    workload, strategy, _ = what_to_plan(request, nodes * basis.setting.ranks_per_node)
    setting = on_devices(basis, request).setting

    @cache
    def prediction(count: int) -> Prediction:
        return predict(workload, strategy, setting, count * setting.ranks_per_node)

    return {
        "nodes": nodes,
        "step_s": lambda count: prediction(count).step.step_s,
        "tokens_per_step": prediction(nodes).tokens,
        "ranks_per_node": setting.ranks_per_node,
        "scaling": workload.train.scaling,
    }


def _refuse_unknown(path: Path, table: dict[str, Any], known: list[str], section: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                f"unknown key {section}{key} in {path}",
                why=did_you_mean(key, known),
                fix=f"the keys are {', '.join(known)}",
            )


def _validate(path: Path, model: type[Model], values: dict[str, Any], section: str) -> Model:
    try:
        return TypeAdapter(model).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
    key, message = str(first["loc"][0]), first["msg"].partition(", unable to parse")[0]
    seen = f"{section}{key.rstrip('_')} = {first['input']!r}: {message[0].lower()}{message[1:]}"
    raise ConfigError(seen, why=f"this comes from {path}", fix="correct it; docs/simulate.md has every key")


def simulate(options: ScenarioFile) -> dict[Policy, Forecast]:
    """Return the forecasts by policy, in the order they are shown."""
    return {
        policy: simulate_scenario(scenario, options.seeds, options.seed)
        for policy, scenario in scenarios(options).items()
    }


def scenarios(options: ScenarioFile) -> dict[Policy, SimulationScenario]:
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


def _cluster(options: ScenarioFile) -> SimulatedCluster:
    step_s = options.step_s
    return SimulatedCluster(
        nodes=options.nodes,
        step_s=step_s if callable(step_s) else divided_work(step_s, options.nodes, options.scaling),
        tokens_per_step=options.tokens_per_step,
        ranks_per_node=options.ranks_per_node,
        scaling=options.scaling,
        min_nodes=options.min_nodes,
        spares=options.spares,
    )


def _checkpoints(
    options: ScenarioFile, cluster: SimulatedCluster, failures: Failures, straggling: Straggling
) -> Checkpoints:
    text = str(options.checkpoint_every)
    if text == "never":
        return Checkpoints(None, options.checkpoint_s)
    if text == "best":
        template = Checkpoints(1, options.checkpoint_s, options.hidden_checkpoints)
        every = best_every(cluster, failures, straggling, template)
    elif text.isdecimal():
        every = int(text)
    else:
        raise ConfigError(
            f"checkpoint_every = {text!r} is not a number of steps",
            why="it is a number above zero, `best` (Young and Daly's formula) or `never`",
            fix='write: checkpoint_every = "best"',
        )
    return Checkpoints(every, options.checkpoint_s, options.hidden_checkpoints)


def _straggling(text: str) -> Straggling:
    if text == "none":
        return Steady()
    kind, _, value = text.partition(":")
    if kind != "lognormal":
        return _fitted(Path(text))
    try:
        return Lognormal(float(value))
    except ValueError:
        raise ConfigError(
            f"straggler = {text!r} states no spread",
            why="SIGMA is the spread of the logarithm of a rank's step time: 0.02 is quiet, 0.3 is bad",
            fix='write for example: straggler = "lognormal:0.05"',
        ) from None


def _fitted(folder: Path) -> Straggling:
    try:
        run = RunFolder.open(folder)
    except DataError as error:
        raise ConfigError(
            f"straggler = {str(folder)!r} is neither none, lognormal:SIGMA nor a run folder",
            why=error.seen,
            fix='write for example: straggler = "lognormal:0.05", or name a folder of: shoal runs',
        ) from None
    return fit_stragglers(step_time_factors(run.read_all_events()))

"""What a profile says of a run before it starts; and what runs say of a profile when they have ended."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.cluster import planned_nodes
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.target import StandingLab, parse_on
from shoal.config.load import load_config, read_profile, to_toml
from shoal.config.manifest import PredictionRecord
from shoal.config.profile import Calibration, Profile
from shoal.config.schema import Config
from shoal.config.sync_choice import choice_in
from shoal.cost.batch_plan import rank_weights
from shoal.cost.buckets import lever_of
from shoal.cost.measured import MeasuredSpeed, setting_of
from shoal.cost.predict import Prediction, predict
from shoal.cost.select_sync import WIRES, SyncOption, candidates, pick, say_why
from shoal.cost.workload import StepTime, workload_of
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.run_folder import RunFolder, write_atomically
from shoal.tools.report.summary import RunSummary, summarize
from shoal.units import count

# SECTION cost/calibrate
# What past runs teach the model: how much slower or faster than predicted computing, updating and exchanging were.


# A phase that takes less of a step than this says more about noise than about the model.
_WORTH_IT = 0.02
# Further away than this a run was something else than what was predicted.
_MOST = 4.0
_VISIBLE = 0.5


@dataclass(frozen=True)
class ComparedRun:
    """One run: its prediction from the uncalibrated profile, and the same phases as measured. `comm_s` is None where
    nobody timed the exchange."""

    predicted: StepTime
    compute_s: float
    optimizer_s: float
    exposed_s: float
    comm_s: float | None
    other_s: float
    step_s: float


def calibrate(outcomes: Sequence[ComparedRun]) -> Calibration:
    """Medians over the runs: one disturbed run must not bend the constants for all others."""
    return Calibration(
        runs=len(outcomes),
        compute=_factor([(each.compute_s, each.predicted.compute_s, each.step_s) for each in outcomes]),
        optimizer=_factor([(each.optimizer_s, each.predicted.optimizer_s, each.step_s) for each in outcomes]),
        comm=_factor([pair for each in outcomes for pair in _exchanges(each)]),
        other_s=max(0.0, statistics.median(each.other_s for each in outcomes)),
    )


def _exchanges(each: ComparedRun) -> list[tuple[float, float, float]]:
    """Nothing where most of it was hidden: behind backward it takes as long as the cores let it, whatever the wire."""
    if each.comm_s is None or each.exposed_s < _VISIBLE * each.comm_s:
        return []
    return [(each.comm_s, each.predicted.comm_s, each.step_s)]


def _factor(pairs: Sequence[tuple[float, float, float]]) -> float:
    ratios = [
        measured / predicted
        for measured, predicted, step_s in pairs
        if min(measured, predicted) > _WORTH_IT * step_s and 1 / _MOST < measured / predicted < _MOST
    ]
    return statistics.median(ratios) if ratios else 1.0


def predict_run(config: Config, path: Path) -> PredictionRecord:
    """For a configuration whose vocabulary is known; `path` is the profile."""
    profile = read_profile(path)
    refuse_another_cluster(profile, path, config.run.on)
    found = _predicted(config, profile)
    model, step = workload_of(config).shape, found.step
    return PredictionRecord(
        step_s=step.step_s,
        compute_s=step.compute_s,
        exposed_s=step.exposed_s,
        wait_s=step.wait_s,
        optimizer_s=step.optimizer_s,
        other_s=step.other_s,
        comm_s=step.comm_s,
        tokens_per_s=found.tokens_per_s,
        profile=str(path.absolute()),
        profile_created=profile.created,
        is_measured=MeasuredSpeed(profile, profile.world_size).pace(model, 0).is_measured,
    )


def store_prediction(run: RunFolder, path: Path) -> PredictionRecord:
    """For a run that was just made; one that cannot be predicted is not started, and leaves no folder behind."""
    try:
        found = predict_run(load_config(run.config), path)
    except ShoalError:
        run.discard()
        raise
    write_atomically(run.prediction, found.model_dump_json(indent=2) + "\n")
    return found


def _predicted(config: Config, profile: Profile) -> Prediction:
    size = profile.world_size
    return predict(
        workload_of(config), lever_of(config.sync), setting_of(profile), size, rank_weights(config.run, size)
    )


def as_it_ran(config: Config, summary: RunSummary) -> Config:
    """With what `sync.mode=auto` chose."""
    choice = choice_in(summary.start) if config.sync.mode == "auto" else None
    if choice is None:
        return config
    return config.model_copy(update={"sync": config.sync.settled(choice)})


def refuse_another_cluster(profile: Profile, path: Path, on: str) -> None:
    """By the machines' addresses and ranks, and for a lab by its links and limits, of which its nodes tell nothing."""
    if on == profile.on and isinstance(parse_on(on), StandingLab):
        # It may be down by now, and its name is all there is to compare.
        return
    measured, wanted = _described(profile), _planned(on)
    if measured == wanted and not _other_lab(profile.on, on):
        return
    seen = f"the profile {path} was measured on another cluster than --on {on}"
    why = f"it knows {profile.on}: {', '.join(measured)}; the run has {', '.join(wanted)}"
    raise ConfigError(seen, why=why, fix=f"measure this one: shoal probe --on {on} -o {shlex.quote(str(path))}")


def _described(profile: Profile) -> list[str]:
    return [_in_words(node.name, node.ranks, node.address) for node in profile.nodes]


def _planned(on: str) -> list[str]:
    return [_in_words(node.name, node.slots, node.address) for node in planned_nodes(on)]


def _in_words(name: str, ranks: int, address: str) -> str:
    return f"{name} ({address}, {count(ranks, 'rank')})"


def _other_lab(measured_on: str, on: str) -> bool:
    measured, wanted = parse_on(measured_on), parse_on(on)
    return isinstance(measured, LabSpec) and isinstance(wanted, LabSpec) and measured != wanted


@dataclass(frozen=True)
class CalibrationResult:
    """A run, and what the profile said of its step before and after it learned from it."""

    run: Path
    measured_s: float
    before_s: float
    after_s: float


def calibrated(path: Path, runs: Sequence[Path]) -> tuple[Profile, list[CalibrationResult]]:
    """The profile with constants fitted to runs on the same cluster. What it had learned before is forgotten."""
    old = read_profile(path)
    fresh = old.model_copy(update={"calibration": None})
    folders = [RunFolder.open(run) for run in runs]
    outcomes = [_outcome(run, fresh, path) for run in folders]
    learned = fresh.model_copy(update={"calibration": calibrate(outcomes)})

    def step_s(profile: Profile, run: RunFolder) -> float:
        ran = as_it_ran(load_config(run.config), summarize(run.read_all_events()))
        return _predicted(ran, profile).step.step_s

    lessons = [
        CalibrationResult(run.path, outcome.step_s, step_s(old, run), step_s(learned, run))
        for run, outcome in zip(folders, outcomes, strict=True)
    ]
    return learned, lessons


def _outcome(run: RunFolder, profile: Profile, path: Path) -> ComparedRun:
    summary = summarize(run.read_all_events())
    config = as_it_ran(load_config(run.config), summary)
    refuse_another_cluster(profile, path, config.run.on)
    if summary.step_s is None or not summary.phases:
        raise DataError(
            f"{run.path} has no measured steps to learn from",
            why=f"its status is {summary.status}, or its phases were not measured (sync.measure=off)",
            fix="name runs that trained for some steps: ls runs/",
        )
    return _observed(_predicted(config, profile), summary, summary.step_s.median)


def _observed(predicted: Prediction, summary: RunSummary, step_s: float) -> ComparedRun:
    phases = summary.phases
    return ComparedRun(
        predicted=predicted.step,
        compute_s=phases.get("forward", 0.0) + phases.get("backward", 0.0),
        optimizer_s=phases.get("optimizer", 0.0),
        exposed_s=phases.get("exposed", 0.0),
        comm_s=summary.allreduce_s.median if summary.allreduce_s else None,
        other_s=phases.get("data", 0.0) + phases.get("other", 0.0),
        step_s=step_s,
    )


# SECTION trials/sync_plan
# `--sync auto` with a profile: what a plan would choose, before the first steps have been measured.


NO_PLAN = "plan: none without a profile (shoal probe makes one); the first steps alone choose how to synchronise"


def store_sync_plan(run: RunFolder, path: Path, discard: bool = True) -> str:
    """For a run that was just made: writes into its settings what the plan chooses, and says why.

    `discard`: without a plan the run folder is removed, because the run does not start.
    """
    try:
        config = load_config(run.config)
        options = sync_options(config, read_profile(path), path)
    except ShoalError:
        if discard:
            run.discard()
        raise
    best = pick(options)
    planned = {"planned": best.choice.text, "planned_step_s": best.step_s}
    config = config.model_copy(update={"sync": config.sync.model_copy(update=planned)})
    write_atomically(run.config, to_toml(config))
    return f"plan: {say_why(best, options, options[0])}, by {path}; the first steps will show whether that is so"


def sync_options(config: Config, profile: Profile, path: Path) -> list[SyncOption]:
    """The ways a run could choose, as the profile predicts them; what does not fit into memory is none of them, but for
    the plainest."""
    refuse_another_cluster(profile, path, config.run.on)
    found = [
        (choice, _predict(config, profile, choice.text))
        for choice in candidates(config.sync, _wires(config), config.train.steps)
    ]
    fitting = [(choice, predicted) for number, (choice, predicted) in enumerate(found) if predicted.fits or not number]
    return [SyncOption(choice, predicted.step.step_s) for choice, predicted in fitting]


def _predict(config: Config, profile: Profile, planned: str) -> Prediction:
    size = profile.world_size
    lever = lever_of(config.sync.model_copy(update={"planned": planned}))
    return predict(workload_of(config), lever, setting_of(profile), size, rank_weights(config.run, size))


def _wires(config: Config) -> tuple[str, ...]:
    """As ranks do when they have measured: memory that they share has one format, and so have other devices but two."""
    if config.sync.inside != "gloo" and len(planned_nodes(config.run.on)) == 1:
        return WIRES[:1]
    return WIRES if config.train.device != "cuda" else WIRES[:2]

"""Predict a run from a profile before it starts, and calibrate a profile with runs that have ended."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cluster.cluster import planned_nodes
from shoal.cluster.lab import LabSpec
from shoal.cluster.target import ExistingLab, parse_on
from shoal.config.defaults import SIMILAR_SPEED
from shoal.config.load import load_config, load_settings, merge, read_profile, to_toml, validate_session
from shoal.config.manifest import PredictionRecord
from shoal.config.profile import SMALL_GPT, Calibration, Profile
from shoal.config.schema import Config, EngineConfig, TrainConfig
from shoal.config.sync_choice import choice_of_event
from shoal.cost.batch_plan import plan_global_batch, rank_weights
from shoal.cost.measured import (
    MeasuredSpeed,
    ScriptSpeed,
    cluster_model_of,
    gpu_backend,
    interpolate,
    rank_devices,
)
from shoal.cost.predict import Prediction, predict
from shoal.cost.select_sync import SyncOption, allowed_wires, candidates, explain_choice, pick
from shoal.cost.strategy import strategy_of_config
from shoal.cost.workload import StepTime, Workload, workload_of
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.records.summary import RunSummary, summarize
from shoal.run_folder import RunFolder, write_atomically
from shoal.units import pluralize

# A phase shorter than this fraction of a step says more about noise than about the model.
_LEAST_FRACTION = 0.02
# A run whose times differ by more than this factor was not the predicted one.
_MOST_FACTOR = 4.0
# An exchange teaches something only if at least this fraction of it was not hidden.
_LEAST_EXPOSED = 0.5

NO_PLAN = "plan: none without a profile (shoal probe makes one); the first steps alone choose how to synchronise"


# Predicting a run


def predict_run(config: Config, path: Path) -> PredictionRecord:
    """Predict a run whose vocabulary is known from the profile at `path`."""
    profile = read_profile(path)
    refuse_another_cluster(profile, path, config.run.on)
    prediction = _predict(config, profile)
    speed = MeasuredSpeed(profile, profile.world_size, rank_devices(profile, config.device_of))
    is_measured = speed.model_speed(workload_of(config).shape, 0).is_measured
    return _record(prediction, profile, path, is_measured=is_measured, tokens_per_s=prediction.tokens_per_s)


def _record(prediction: Prediction, profile: Profile, path: Path, **fields: Any) -> PredictionRecord:
    step = prediction.step
    return PredictionRecord(
        step_s=step.step_s,
        compute_s=step.compute_s,
        exposed_s=step.exposed_s,
        wait_s=step.wait_s,
        optimizer_s=step.optimizer_s,
        other_s=step.other_s,
        comm_s=step.comm_s,
        profile=str(path.absolute()),
        profile_created=profile.created,
        **fields,
    )


def store_prediction(run: RunFolder, path: Path) -> PredictionRecord:
    """Predict a new run and store the prediction. A run that cannot be predicted is not started: remove its folder."""
    try:
        record = predict_run(load_config(run.config), path)
    except ShoalError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    write_atomically(run.prediction, record.model_dump_json(indent=2) + "\n")
    return record


def predict_script(settings: Mapping[str, Any], alone: Path, path: Path) -> PredictionRecord:
    """Predict a user's script from an earlier run of it on one rank, and the profile at `path`.

    `settings` are those of the command line, section by section; all others are taken from the run on one rank.
    """
    profile, run = read_profile(path), RunFolder.open(alone)
    summary = summarize(run.read_all_events())
    before = load_settings(run.config).model_dump(exclude_unset=True)
    config = validate_session(merge([before, {"run": {"weights": None}}, settings]))
    refuse_another_cluster(profile, path, config.run.on)
    devices = rank_devices(profile, config.device_of)
    model = cluster_model_of(profile, devices)
    start = summary.start
    _refuse_other_rank(alone, summary, profile, path, devices[0])
    samples, phases = float(summary.samples_per_step or 1), summary.phases
    speed = ScriptSpeed(
        MeasuredSpeed(profile, profile.world_size, devices),
        forward_s=phases.get("forward", 0.0) / samples,
        backward_s=phases.get("backward", 0.0) / samples,
        optimizer_s=phases.get("optimizer", 0.0),
        other_s=phases.get("data", 0.0) + phases.get("other", 0.0),
    )
    workload = Workload(
        name=config.run.preset,
        parameters=int(start["grad_bytes"]) // 4,
        flops_per_token=0.0,
        seq_len=1,
        train=TrainConfig.model_validate(config.train.model_dump()),
    )
    size = profile.world_size
    prediction = predict(
        workload, strategy_of_config(config.sync), replace(model, speed=speed), size, rank_weights(config.run, size)
    )
    return _record(
        prediction,
        profile,
        path,
        is_measured=True,
        tokens_per_s=None,
        samples_per_s=prediction.batch_plan.global_batch / prediction.step.step_s,
        measured_in=str(alone.absolute()),
        grad_bytes=int(start["grad_bytes"]),
    )


def _refuse_other_rank(alone: Path, summary: RunSummary, profile: Profile, path: Path, device: str) -> None:
    """Refuse a run that does not show how fast a rank of the profile's first node computes."""
    start = summary.start
    if summary.step_s is None or not summary.phases or summary.world_size != 1 or not start.get("grad_bytes"):
        raise ConfigError(
            f"{alone} does not show how fast the script computes on one rank",
            why=f"it has {pluralize(summary.world_size, 'rank')} and {pluralize(summary.steps_done, 'step')}, "
            "or its steps have no phases (a script without shoal.Session, sync.measure=off)",
            fix="make such a run: shoal run --on local:1 --threads N --steps 30 SCRIPT",
        )
    measured_on = str(start.get("device", "cpu")).partition(":")[0]
    if measured_on != device:
        raise ConfigError(
            f"the run {alone} was measured on {measured_on}",
            why=f"the first rank of {profile.on} computes on {device} (by {path})",
            fix=f"measure one rank like that: shoal run --on local:1 --set train.device={device} --steps 30 SCRIPT",
        )
    threads, cpu = profile.nodes[0].timings[0].threads, start.get("hardware", {}).get("cpu")
    if device == "cpu" and (start.get("threads") != threads or cpu != profile.nodes[0].cpu):
        raise ConfigError(
            f"the run {alone} was measured with {start.get('threads')} threads on {cpu}",
            why=f"a rank of {profile.on} has {pluralize(threads, 'thread')} on {profile.nodes[0].cpu} (by {path})",
            fix=f"measure one rank like those: shoal run --on local:1 --threads {threads} --steps 30 SCRIPT",
        )


def _predict(config: Config, profile: Profile) -> Prediction:
    size = profile.world_size
    return predict(
        workload_of(config),
        strategy_of_config(config.sync),
        cluster_model_of(profile, rank_devices(profile, config.device_of)),
        size,
        rank_weights(config.run, size),
    )


def refuse_another_cluster(profile: Profile, path: Path, on: str) -> None:
    """Compare the machines' addresses and ranks, and for a lab its links and limits, which its nodes do not show."""
    if on == profile.on and isinstance(parse_on(on), ExistingLab):
        # The lab may be down by now, so only its name can be compared.
        return

    def described(name: str, ranks: int, address: str) -> str:
        return f"{name} ({address}, {pluralize(ranks, 'rank')})"

    measured = [described(node.name, node.ranks, node.address) for node in profile.nodes]
    wanted = [described(node.name, node.slots, node.address) for node in planned_nodes(on)]
    specs = parse_on(profile.on), parse_on(on)
    is_other_lab = all(isinstance(spec, LabSpec) for spec in specs) and specs[0] != specs[1]
    if measured == wanted and not is_other_lab:
        return
    raise ConfigError(
        f"the profile {path} was measured on another cluster than --on {on}",
        why=f"it knows {profile.on}: {', '.join(measured)}; the run has {', '.join(wanted)}",
        fix=f"measure this one: shoal probe --on {on} -o {shlex.quote(str(path))}",
    )


# The first shares, before the ranks have measured their own speeds


def first_speeds(config: EngineConfig, path: Path) -> str | None:
    """Return the speeds of the ranks by a profile, as `run.speeds`; None where shares are not divided by them."""
    run, profile = config.run, read_profile(path)
    is_fixed = run.weights is not None or run.balance == "off" or config.sync.measure == "off"
    if is_fixed or (isinstance(config, Config) and config.data.sharding == "modulo"):
        return None
    refuse_another_cluster(profile, path, run.on)
    if len(profile.nodes) < 2 and run.devices is None:
        return None
    size = profile.world_size
    speed = MeasuredSpeed(profile, size, rank_devices(profile, config.device_of))
    precision: str | None = None
    model, micro_batch = SMALL_GPT, 1
    if isinstance(config, Config):
        model, precision = config.model, config.train.precision
        micro_batch = plan_global_batch(config, size).micro_batch
    rates = []
    for rank in range(size):
        times = speed.model_speed(model, rank, precision)
        rates.append(1 / (interpolate(times.forward, micro_batch) + interpolate(times.backward, micro_batch)))
    relative = [max(0.001, rate / max(rates)) for rate in rates]
    return "/".join(f"{rate:.3f}" for rate in relative) if min(relative) < 1 / SIMILAR_SPEED else None


def store_first_speeds(run: RunFolder, path: Path) -> None:
    """Write the speeds by a profile into the settings of a new run, if the profile is of its machines."""
    config = load_config(run.config)
    with contextlib.suppress(ShoalError):
        if speeds := first_speeds(config, path):
            update = {"run": config.run.model_copy(update={"speeds": speeds})}
            write_atomically(run.config, to_toml(config.model_copy(update=update)))


# Planning `--sync auto`, before the first steps have been measured


def store_sync_plan(run: RunFolder, path: Path, discard: bool = True) -> str:
    """Write the plan's choice into the settings of a new run, and return the reason as a sentence.

    `discard`: remove the run folder if there is no plan, because the run does not start.
    """
    try:
        config = load_config(run.config)
        options = sync_options(config, read_profile(path), path)
    except ShoalError:
        if discard:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    best = pick(options)
    planned = {"planned": best.choice.text, "planned_step_s": best.step_s}
    config = config.model_copy(update={"sync": config.sync.model_copy(update=planned)})
    write_atomically(run.config, to_toml(config))
    return f"plan: {explain_choice(best, options, options[0])}, by {path}; the first steps will show whether that is so"


def sync_options(config: Config, profile: Profile, path: Path) -> list[SyncOption]:
    """Return the choices of a run with predicted times; those that do not fit into memory are left out, except the
    plainest."""
    refuse_another_cluster(profile, path, config.run.on)
    has_nccl = gpu_backend(profile, rank_devices(profile, config.device_of)) == "nccl"
    is_in_memory = not has_nccl and config.sync.inside != "gloo" and len(planned_nodes(config.run.on)) == 1
    wires = allowed_wires(is_in_memory, is_gloo=not has_nccl)
    options: list[SyncOption] = []
    for choice in candidates(config.sync, wires, config.train.steps):
        planned = config.sync.model_copy(update={"planned": choice.text})
        prediction = _predict(config.model_copy(update={"sync": planned}), profile)
        if prediction.fits or not options:
            options.append(SyncOption(choice, prediction.step.step_s))
    return options


# Calibrating a profile


@dataclass(frozen=True)
class ComparedRun:
    """One run: its prediction from the uncalibrated profile, and the same phases as measured."""

    predicted: StepTime
    compute_s: float
    optimizer_s: float
    exposed_s: float
    comm_s: float | None  # None where the exchange was not timed
    other_s: float
    step_s: float


@dataclass(frozen=True)
class CalibrationResult:
    """A run, and the step time that the profile predicted before and after its calibration."""

    run: Path
    measured_s: float
    before_s: float
    after_s: float


def calibrate_profile(path: Path, runs: Sequence[Path]) -> tuple[Profile, list[CalibrationResult]]:
    """Return the profile with constants fitted to runs on the same cluster, replacing an earlier calibration."""
    old = read_profile(path)
    fresh = old.model_copy(update={"calibration": None})
    folders = [RunFolder.open(run) for run in runs]
    compared = [_compare(run, fresh, path) for run in folders]
    learned = fresh.model_copy(update={"calibration": calibrate(compared)})

    def step_s(profile: Profile, run: RunFolder) -> float:
        ran = config_as_run(load_config(run.config), summarize(run.read_all_events()))
        return _predict(ran, profile).step.step_s

    results = [
        CalibrationResult(run.path, outcome.step_s, step_s(old, run), step_s(learned, run))
        for run, outcome in zip(folders, compared, strict=True)
    ]
    return learned, results


def _compare(run: RunFolder, profile: Profile, path: Path) -> ComparedRun:
    summary = summarize(run.read_all_events())
    config = config_as_run(load_config(run.config), summary)
    refuse_another_cluster(profile, path, config.run.on)
    phases = summary.phases
    if summary.step_s is None or not phases:
        raise DataError(
            f"{run.path} has no measured steps to learn from",
            why=f"its status is {summary.status}, or its phases were not measured (sync.measure=off)",
            fix="name runs that trained for some steps: shoal runs",
        )
    return ComparedRun(
        predicted=_predict(config, profile).step,
        compute_s=phases.get("forward", 0.0) + phases.get("backward", 0.0),
        optimizer_s=phases.get("optimizer", 0.0),
        exposed_s=phases.get("exposed", 0.0),
        comm_s=summary.allreduce_s.median if summary.allreduce_s else None,
        other_s=phases.get("data", 0.0) + phases.get("other", 0.0),
        step_s=summary.step_s.median,
    )


def config_as_run(config: Config, summary: RunSummary) -> Config:
    """Replace `sync.mode=auto` by what it chose."""
    choice = choice_of_event(summary.start) if config.sync.mode == "auto" else None
    if choice is None:
        return config
    return config.model_copy(update={"sync": config.sync.with_choice(choice)})


def calibrate(runs: Sequence[ComparedRun]) -> Calibration:
    """Take medians over the runs: one disturbed run must not bend the constants for all others."""
    # A mostly hidden exchange takes as long as the cores let it, whatever the network.
    exchanges = [
        (run.comm_s, run.predicted.comm_s, run.step_s)
        for run in runs
        if run.comm_s is not None and run.exposed_s >= _LEAST_EXPOSED * run.comm_s
    ]
    return Calibration(
        runs=len(runs),
        compute=_factor([(run.compute_s, run.predicted.compute_s, run.step_s) for run in runs]),
        optimizer=_factor([(run.optimizer_s, run.predicted.optimizer_s, run.step_s) for run in runs]),
        comm=_factor(exchanges),
        other_s=max(0.0, statistics.median(run.other_s for run in runs)),
    )


def _factor(times: Sequence[tuple[float, float, float]]) -> float:
    """Return the median ratio of (measured, predicted, step) times that are comparable."""
    ratios = [
        measured / predicted
        for measured, predicted, step_s in times
        if min(measured, predicted) > _LEAST_FRACTION * step_s
        and 1 / _MOST_FACTOR < measured / predicted < _MOST_FACTOR
    ]
    return statistics.median(ratios) if ratios else 1.0

"""`--sync auto` with a profile: what a plan would choose, before the first steps have been measured."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster.cluster import planned_nodes
from shoal.config.load import load_config, to_toml
from shoal.config.profile import Profile
from shoal.config.profile_file import read_profile
from shoal.config.schema import Config
from shoal.cost.batch import rank_weights
from shoal.cost.choose import WIRES, Option, candidates, pick, say_why
from shoal.cost.lever import lever_of
from shoal.cost.measured import setting_of
from shoal.cost.predict import Prediction, predict
from shoal.cost.workload import workload_of
from shoal.errors import ShoalError
from shoal.runfolder import RunFolder, write_atomically
from shoal.trials.predicting import refuse_another_cluster

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


def sync_options(config: Config, profile: Profile, path: Path) -> list[Option]:
    """The ways a run could choose, as the profile predicts them; what does not fit into memory is none of them, but for
    the plainest."""
    refuse_another_cluster(profile, path, config.run.on)
    found = [
        (choice, _predict(config, profile, choice.text))
        for choice in candidates(config.sync, _wires(config), config.train.steps)
    ]
    fitting = [(choice, predicted) for number, (choice, predicted) in enumerate(found) if predicted.fits or not number]
    return [Option(choice, predicted.step.step_s) for choice, predicted in fitting]


def _predict(config: Config, profile: Profile, planned: str) -> Prediction:
    size = profile.world_size
    lever = lever_of(config.sync.model_copy(update={"planned": planned}))
    return predict(workload_of(config), lever, setting_of(profile), size, rank_weights(config.run, size))


def _wires(config: Config) -> tuple[str, ...]:
    """As ranks do when they have measured: memory that they share has one format, and so have other devices but two."""
    if config.sync.inside != "gloo" and len(planned_nodes(config.run.on)) == 1:
        return WIRES[:1]
    return WIRES if config.train.device != "cuda" else WIRES[:2]

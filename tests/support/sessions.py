"""Sessions of small models inside the ranks of `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.load import to_toml, validate_session
from shoal.control.rank_env import Placement
from shoal.engine.environment import SessionStart
from shoal.engine.session import Session, Step
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks

# Attaches a model to the session and returns what does one step.
Recipe = Callable[[Session], Callable[[Step], None]]


class SessionInWorld(Session):
    """A session in a world that the test has formed, and leaves."""

    def _leave(self) -> None:
        self.data.close()


def open_session(world: World, path: Path, settings: Mapping[str, Any]) -> Session:
    config = validate_session(settings)
    placement = Placement(world.rank, world.size, world.local_rank, world.local_size, launcher="shoal")
    run = RunFolder(path)
    resume = any(run.checkpoints.glob("step-*"))
    world = replace(world, keeps_files=world.is_main)
    return SessionInWorld.of(SessionStart(config, run, placement, resume, world=world))


def make_folder(path: Path, settings: Mapping[str, Any]) -> Path:
    """Create the run folder, as a launcher would."""
    if not path.exists():
        run = RunFolder.create(path, is_training=False)
        for name in ("events", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        run.config.write_text(to_toml(validate_session(settings)))
    return path


def train_on_rank(
    world: World, path: Path, settings: Mapping[str, Any], recipe: Recipe, stop_after: int | None
) -> tuple[str, dict[str, list[float]]]:
    """Train to the end, or to this step; return the digest of the state, and the buffers."""
    session = open_session(world, path, settings)
    do_step = recipe(session)
    for step in session:
        if step.number == stop_after:
            session.stop()
        with step:
            do_step(step)
    state = session.replica.state
    return state.digest(), {name: buffer.flatten().tolist() for name, buffer in state.buffers().items()}


def train(
    path: Path, ranks: int, recipe: Recipe, settings: Mapping[str, Any], stop_after: int | None = None
) -> list[float]:
    """Train by a recipe on so many ranks; return the loss of every step. All replicas must end equal to the bit."""
    make_folder(path, settings)
    results = run_ranks(train_on_rank, ranks, path.parent, path, settings, recipe, stop_after, deadline_s=100)
    assert len({digest for digest, _ in results}) == 1, "the replicas differ"
    assert all(buffers == results[0][1] for _, buffers in results)
    commits = read_jsonl(path / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, len(commits) + 1))
    return [commit["loss"] for commit in commits]

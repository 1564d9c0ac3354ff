"""Train shoal's GPT inside the ranks of `run_ranks`, with a look at the replica before every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from shoal.config.load import build_config, load_config
from shoal.config.schema import Config
from shoal.control.rank_env import Placement
from shoal.data.prepare import create_run
from shoal.engine.environment import SessionStart
from shoal.engine.replica import Replica
from shoal.engine.session import Session, Step
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from shoal.train.gpt_training import train_gpt
from tests.support.programs import TINY


def make_run(folder: Path, ranks: int, *sets: str) -> RunFolder:
    """Create the run folder of the smallest model, as a launcher would."""
    run = create_run(build_config("grammar", None, sets=(*TINY, *sets)), folder / "run", ranks)
    for name in ("events", "checkpoints"):
        (run.path / name).mkdir(exist_ok=True)
    return run


class WatchedSession(Session):
    """A session that calls `before_step` with its replica before every step. If that returns True, the loop ends."""

    before_step: Callable[[Replica], bool | None] = staticmethod(lambda replica: None)

    def __iter__(self) -> Iterator[Step]:
        for step in super().__iter__():
            if self.before_step(self.replica):
                return
            yield step


class GptTraining:
    """A training of the GPT of a run folder in a world that exists already."""

    def __init__(self, world: World, path: Path, resume: bool = False) -> None:
        world = replace(world, keeps_files=world.is_main)
        self.run = RunFolder.open(path)
        self.config: Config = load_config(self.run.config)
        placement = Placement(world.rank, world.size, world.local_rank, world.local_size, launcher="shoal")
        start = SessionStart(self.config, self.run, placement, resume, self.config.data.sharding, world=world)
        self.session = WatchedSession.of(start)

    @property
    def replica(self) -> Replica:
        return self.session.replica

    def train(self, before_step: Callable[[Replica], bool | None] = lambda replica: None) -> bool:
        """Train to the end; return whether it was reached."""
        self.session.before_step = before_step
        return train_gpt(self.session, self.config, self.run)

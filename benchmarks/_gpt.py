"""shoal's GPT, one step at a time, and the same batches for a loop without shoal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from shoal.config.schema import Config
from shoal.control.rank_env import Placement
from shoal.cost.batch_plan import plan_global_batch
from shoal.data.prepare import read_data_facts
from shoal.data.tokens import TokenWindows, open_tokens
from shoal.engine.environment import SessionStart
from shoal.engine.sampling import CursorShard
from shoal.engine.session import Session
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from shoal.train.gpt_training import GptTrainer, TextSource, split_inputs_targets

# Nothing but steps: a training that never ends, evaluates, saves, compares or pins.
STEPS_ONLY = (
    "train.steps=1000000",
    "train.eval_every=1000000",
    "train.checkpoint_every=1000000",
    "members.digest_every=1000000",
    "train.pin=off",
)


def make_step(config: Config, run: RunFolder, world: World) -> Callable[[], object]:
    """Return a function that does the next step of a training in this world."""
    placement = Placement(world.rank, world.size, world.local_rank, world.local_size, launcher="shoal")
    session = Session.of(SessionStart(config, run, placement, sharding=config.data.sharding, world=world))
    steps = GptTrainer(session, config, run).steps()
    return lambda: next(steps)


class PlainBatches:
    """The batches of a training on one rank, without a session."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        windows = TokenWindows(open_tokens(Path(read_data_facts(run).train)).tokens, config.model.seq_len)
        self._text = TextSource(windows)
        self._shard = CursorShard(0, plan_global_batch(config, 1), len(windows), config.train.seed)
        self._cursor = 0

    def next_step(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from map(split_inputs_targets, self._text.fetch(self._shard, self._cursor))
        self._cursor += self._shard.plan.global_batch

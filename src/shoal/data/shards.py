"""Who gets which samples: the share of each rank in a global batch, and classroom shards.

Two ways to split data over ranks. `cursor`: one global order, each step takes the next global batch and deals it over
whoever is there, so the samples a step sees do not depend on the number of ranks. `modulo`: rank r only ever sees
samples with `index % world_size == r`, as most first lessons do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

from shoal.config.schema import Config
from shoal.cost.batch import Deal, deal, micro_batch, rank_weights, world_batch
from shoal.data.order import Indices, sample_indices
from shoal.errors import UsageError

T = TypeVar("T")


@overload
def make_shard(rank: int, world_size: int) -> list[str]: ...
@overload
def make_shard(rank: int, world_size: int, items: Sequence[T]) -> list[T]: ...
def make_shard(rank: int, world_size: int, items: Sequence[T] | None = None) -> list[T] | list[str]:
    """The items with `index % world_size == rank`: disjoint, complete, and equal in size to within one.

    Without `items`, the training sentences of the built-in English-verb corpus.
    """
    check_rank(rank, world_size)
    if items is None:
        from shoal.data.grammar import training_sentences

        return training_sentences()[rank::world_size]
    return list(items[rank::world_size])


def check_rank(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of {world_size} does not exist",
            why="ranks count from 0 to world_size - 1",
            fix="pass the two values that init_distributed() returns",
        )


def deal_for(config: Config, world_size: int) -> Deal:
    """Accumulated batches are dealt as one, in micro-batches of the size that a single one would have."""
    weights = rank_weights(config.run, world_size)
    batch = config.sync.accumulate * world_batch(config.train, world_size)
    return deal(batch, micro_batch(config.train, weights), weights)


@dataclass(frozen=True)
class CursorShard:
    """This rank's samples when one global order is dealt over the world."""

    rank: int
    deal: Deal
    count: int
    seed: int

    def indices(self, cursor: int) -> Indices:
        """The samples of the step that begins at the global position `cursor`."""
        return sample_indices(np.arange(*self.positions(cursor)), self.count, self.seed)

    def positions(self, cursor: int) -> tuple[int, int]:
        """Where these stand in the order of the data, `[first, end)`."""
        first = cursor + self.deal.offset(self.rank)
        return first, first + self.deal.share(self.rank)

    @property
    def size(self) -> int:
        """How many samples of the first epoch fall to this rank; the sizes of all ranks add up to `count`."""
        steps, rest = divmod(self.count, self.deal.global_batch)
        share = self.deal.share(self.rank)
        return steps * share + min(max(rest - self.deal.offset(self.rank), 0), share)


@dataclass(frozen=True)
class ModuloShard:
    """This rank's samples when it owns every `world_size`-th one."""

    rank: int
    deal: Deal
    count: int
    seed: int

    def indices(self, cursor: int) -> Indices:
        inside = sample_indices(np.arange(*self.positions(cursor)), self.size, self.seed)
        return inside * len(self.deal.micro_batches) + self.rank

    def positions(self, cursor: int) -> tuple[int, int]:
        """Where a step's samples stand in the order of this shard, `[first, end)`."""
        share = self.deal.share(self.rank)
        first = cursor // self.deal.global_batch * share
        return first, first + share

    @property
    def size(self) -> int:
        return len(range(self.rank, self.count, len(self.deal.micro_batches)))


Shard = CursorShard | ModuloShard
SHARDS: dict[str, type[CursorShard] | type[ModuloShard]] = {"cursor": CursorShard, "modulo": ModuloShard}

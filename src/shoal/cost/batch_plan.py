"""How a step's global batch is sized and divided among the ranks, and the learning rate that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.schema import EngineConfig, LoopConfig, RunConfig, TrainConfig
from shoal.errors import ConfigError
from shoal.units import pluralize

# The fixed cost of dispatching a micro-batch is about that of two sequences on small models.
_OVERHEAD_SEQUENCES = 2
MICRO_BATCH_CAP = 64


@dataclass(frozen=True)
class BatchPlan:
    """One step's global batch, divided among the ranks. Each computes its share in as few micro-batches as it can."""

    micro_batch: int  # The most sequences that a rank computes at once.
    shares: tuple[int, ...]  # Sequences by rank.

    @property
    def global_batch(self) -> int:
        return sum(self.shares)

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches have the same size."""
        return not any(share % self.micro_batch for share in self.shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """The micro-batches of every rank in one step."""
        return tuple(math.ceil(share / self.micro_batch) for share in self.shares)

    @property
    def largest_part(self) -> float:
        """The sequences of the rank with most of them, relative to the average."""
        return max(self.shares) * len(self.shares) / self.global_batch

    def sizes(self, rank: int) -> tuple[int, ...]:
        """Return the sequences of each micro-batch of this rank: equal numbers, or one more or less."""
        count = math.ceil(self.shares[rank] / self.micro_batch)
        size, rest = divmod(self.shares[rank], count)
        return (size + 1,) * rest + (size,) * (count - rest)

    def offset(self, rank: int) -> int:
        """Return where this rank's sequences start inside the global batch."""
        return sum(self.shares[:rank])


def world_batch(train: LoopConfig, world_size: int) -> int:
    """Return the sequences per step of all ranks: the configured batch, or that per rank with weak scaling."""
    return train.global_batch * (world_size if train.scaling == "weak" else 1)


def scaled_lr(train: TrainConfig, world_size: int, accumulate: int = 1) -> float:
    """Scale the learning rate linearly from the batch it was tuned for; accumulated batches count as one."""
    return train.lr * accumulate * world_batch(train, world_size) / train.base_batch


def learning_rate(step: int, peak: float, train: TrainConfig) -> float:
    """Return the rate of a step, counted from 1: a linear warm-up, then a cosine down to a fraction of the peak.

    A warm-up longer than the run is cut to the run, so that short trials still reach the peak.
    """
    warmup = min(train.warmup_steps, train.steps)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    floor = peak * train.min_lr_fraction
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def rank_weights(run: RunConfig, world_size: int) -> tuple[float, ...]:
    """Return the ranks' shares of a batch at the start, relative to each other."""
    weights = _given_weights(run)
    if not weights:
        return (1.0,) * world_size
    if len(weights) != world_size or min(weights) <= 0:
        name = "weights" if run.weights else "speeds"
        raise ConfigError(
            f"run.{name}={run.weights or run.speeds} does not fit {world_size} ranks",
            why="it has one number above zero for each rank",
            fix=f"write for example: --set run.{name}={'/'.join(['1'] * world_size)}",
        )
    return weights


def weights_of(run: RunConfig, ids: Sequence[int]) -> tuple[float, ...]:
    """Return the shares of the ranks with these ids; one that joined later gets the average."""
    known = _given_weights(run)
    average = sum(known) / len(known) if known else 1.0
    return tuple(known[number] if number < len(known) else average for number in ids)


def _given_weights(run: RunConfig) -> tuple[float, ...]:
    given = run.weights or run.speeds
    return tuple(float(part) for part in given.split("/")) if given else ()


def shares(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `count` micro-batches or sequences by weight, at least one per rank.

    The remainder goes to the ranks that would finish first.
    """
    if len(set(weights)) == 1:
        # By counting: the search below would take minutes for sixteen thousand ranks.
        base, rest = divmod(count, len(weights))
        return (base + 1,) * rest + (base,) * (len(weights) - rest)
    ranks = range(len(weights))
    parts = [max(1, math.floor(count * weight / sum(weights))) for weight in weights]
    while sum(parts) > count:
        parts[max(ranks, key=lambda rank: (parts[rank] > 1, parts[rank] / weights[rank]))] -= 1
    while sum(parts) < count:
        parts[min(ranks, key=lambda rank: (parts[rank] + 1) / weights[rank])] += 1
    return tuple(parts)


def divide_batch(global_batch: int, micro_batch: int, weights: Sequence[float]) -> BatchPlan:
    """Divide by weight, as nearly as whole micro-batches allow; with equal weights the first ranks take the rest."""
    return BatchPlan(micro_batch, tuple(micro_batch * part for part in shares(global_batch // micro_batch, weights)))


def plan_global_batch(config: EngineConfig, world_size: int) -> BatchPlan:
    """Divide the global batch over the ranks. Accumulated batches count as one, in micro-batches of the usual size."""
    weights = rank_weights(config.run, world_size)
    batch = config.sync.accumulate * world_batch(config.train, world_size)
    return divide_batch(batch, micro_batch(config.train, weights), weights)


def redivide_batch(global_batch: int, most: int, weights: Sequence[float], is_compiled: bool = False) -> BatchPlan:
    """Divide the same global batch among other ranks, in micro-batches of at most `most` sequences.

    Compiled code needs them of one size, the largest that fits: compiling takes longer than many steps.
    """
    if global_batch < len(weights):
        raise ConfigError(
            f"{len(weights)} ranks cannot share a global batch of {pluralize(global_batch, 'sequence')}",
            why="every rank needs at least one sequence in each step",
            fix=f"let fewer machines in: --set members.max_nodes={max(1, len(weights) - 1)}",
        )
    if not is_compiled:
        return BatchPlan(most, shares(global_batch, weights))
    sizes = (size for size in divisors(global_batch, most) if global_batch // size >= len(weights))
    return divide_batch(global_batch, max(sizes), weights)


def micro_batch(train: LoopConfig, weights: Sequence[float], most: int = MICRO_BATCH_CAP) -> int:
    """Return the configured micro-batch if it fits, otherwise the one up to `most` that leaves the busiest rank the
    least work."""
    world_size = len(weights)
    batch = world_batch(train, world_size)
    if batch < world_size:
        raise ConfigError(
            f"{world_size} ranks cannot share a global batch of {pluralize(batch, 'sequence')}",
            why="every rank needs at least one sequence in each step",
            fix=f"use --set train.global_batch={world_size} or more, or fewer ranks",
        )
    size = train.micro_batch
    if size is None:
        return _least_work(batch, divisors(batch, most), weights)
    if batch % size or batch // size < world_size:
        sizes = [divisor for divisor in divisors(batch, MICRO_BATCH_CAP) if batch // divisor >= world_size]
        nearest = min(sizes, key=lambda divisor: abs(divisor - size))
        raise ConfigError(
            f"a global batch of {pluralize(batch, 'sequence')} cannot be shared by {world_size} ranks in micro-batches "
            f"of {size}",
            why="shares are whole micro-batches of one size, at least one for every rank",
            fix=f"use --set train.micro_batch={nearest}, or leave it out",
        )
    return size


def half_micro_batch(train: LoopConfig, weights: Sequence[float]) -> int | None:
    """Return half of the present micro-batch, or the next below that fits; None where it cannot be smaller."""
    half = micro_batch(train, weights) // 2
    return max(divisors(world_batch(train, len(weights)), half), default=None)


def _least_work(batch: int, sizes: Sequence[int], weights: Sequence[float]) -> int:
    """Return the micro-batch that leaves the slowest rank the least work, in sequences of a rank of weight 1."""

    def busiest(size: int) -> float:
        count = batch // size
        if count < len(weights):
            return math.inf
        if len(set(weights)) == 1:
            return math.ceil(count / len(weights)) / weights[0] * (size + _OVERHEAD_SEQUENCES)
        parts = zip(shares(count, weights), weights, strict=True)
        return max(part / weight for part, weight in parts) * (size + _OVERHEAD_SEQUENCES)

    return min(sizes, key=lambda size: (busiest(size), -size))


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors up to `most`: the sizes of micro-batches that a batch can be divided into."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]

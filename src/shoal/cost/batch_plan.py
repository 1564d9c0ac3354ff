"""How a step's batch is sized and cut: the world's batch, the micro-batch, the learning rate that goes with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.schema import RunConfig, TrainConfig
from shoal.errors import ConfigError

# A micro-batch costs a fixed amount of dispatch beside its arithmetic; about two sequences' worth on small models.
_OVERHEAD_SEQUENCES = 2
MICRO_BATCH_CAP = 64


def world_batch(train: TrainConfig, world_size: int) -> int:
    """Sequences per step of the whole world: the stated batch, or that per rank when scaling is weak."""
    return train.global_batch * (world_size if train.scaling == "weak" else 1)


def scaled_lr(train: TrainConfig, world_size: int, accumulate: int = 1) -> float:
    """Linear scaling from the batch the rate was tuned for; accumulated batches are one."""
    return train.lr * accumulate * world_batch(train, world_size) / train.base_batch


def learning_rate(step: int, peak: float, train: TrainConfig) -> float:
    """The rate of a step, counted from 1: a linear warm-up, then a cosine down to a fraction of the peak.

    A warm-up longer than the run is cut to the run, so short trials still reach the peak.
    """
    warmup = min(train.warmup_steps, train.steps)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    floor = peak * train.min_lr_fraction
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def rank_weights(run: RunConfig, world_size: int) -> tuple[float, ...]:
    """How the ranks share a batch, relative to each other."""
    if run.weights is None:
        return (1.0,) * world_size
    weights = tuple(float(part) for part in run.weights.split("/"))
    if len(weights) != world_size or min(weights) <= 0:
        raise ConfigError(
            f"run.weights={run.weights} does not fit {world_size} ranks",
            why="it has one number above zero for each rank",
            fix=f"write for example: --set run.weights={'/'.join(['1'] * world_size)}",
        )
    return weights


def shares(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`count` micro-batches by weight, at least one each; what does not come out even goes to whoever is done first."""
    if len(set(weights)) == 1:
        each, rest = divmod(count, len(weights))
        # By counting: the search below would take minutes for sixteen thousand ranks.
        return (each + 1,) * rest + (each,) * (len(weights) - rest)
    ranks = range(len(weights))
    dealt = [max(1, math.floor(count * weight / sum(weights))) for weight in weights]
    while sum(dealt) > count:
        dealt[max(ranks, key=lambda rank: (dealt[rank] > 1, dealt[rank] / weights[rank]))] -= 1
    while sum(dealt) < count:
        dealt[min(ranks, key=lambda rank: (dealt[rank] + 1) / weights[rank])] += 1
    return tuple(dealt)


@dataclass(frozen=True)
class BatchPlan:
    """One step's global batch in whole micro-batches, dealt over the ranks of a world."""

    micro_batch: int
    micro_batches: tuple[int, ...]

    @property
    def global_batch(self) -> int:
        return self.micro_batch * sum(self.micro_batches)

    def share(self, rank: int) -> int:
        """Sequences of this rank in one step."""
        return self.micro_batch * self.micro_batches[rank]

    def offset(self, rank: int) -> int:
        """Where this rank's sequences begin inside the global batch."""
        return self.micro_batch * sum(self.micro_batches[:rank])


def deal(global_batch: int, micro_batch: int, weights: Sequence[float]) -> BatchPlan:
    """By weight, as nearly as whole micro-batches allow; among equals the first ranks take one more."""
    return BatchPlan(micro_batch, shares(global_batch // micro_batch, weights))


def deal_anew(global_batch: int, most: int, weights: Sequence[float], is_compiled: bool = False) -> BatchPlan:
    """The same global batch over other ranks, in the micro-batches up to `most` that leave the busiest the least work.
    What is compiled for one shape keeps it where that gives everybody one: compiling takes longer than many steps."""
    fitting = [size for size in _divisors(global_batch, most) if global_batch // size >= len(weights)]
    if not fitting:
        raise ConfigError(
            f"{len(weights)} ranks cannot share a global batch of {global_batch} sequences",
            why="every rank needs at least one sequence in each step",
            fix=f"let fewer machines in: --set members.max_nodes={max(1, len(weights) - 1)}",
        )
    size = max(fitting) if is_compiled else _least_work(global_batch, fitting, weights)
    return deal(global_batch, size, weights)


def weights_of(run: RunConfig, ids: Sequence[int]) -> tuple[float, ...]:
    """How these ranks share a batch, by their own numbers; one that came later is like the average."""
    known = tuple(float(part) for part in run.weights.split("/")) if run.weights else (1.0,)
    usual = sum(known) / len(known)
    return tuple(known[number] if run.weights and number < len(known) else usual for number in ids)


def micro_batch(train: TrainConfig, weights: Sequence[float], most: int = MICRO_BATCH_CAP) -> int:
    """The stated micro-batch if it fits, otherwise the one up to `most` that leaves the busiest rank the least work."""
    world_size = len(weights)
    batch = world_batch(train, world_size)
    if batch < world_size:
        raise ConfigError(
            f"{world_size} ranks cannot share a global batch of {batch} sequences",
            why="every rank needs at least one sequence in each step",
            fix=f"use --set train.global_batch={world_size} or more, or fewer ranks",
        )
    if train.micro_batch is None:
        return _least_work(batch, _divisors(batch, most), weights)
    _check_fits(train.micro_batch, batch, world_size)
    return train.micro_batch


def half_micro_batch(train: TrainConfig, weights: Sequence[float]) -> int | None:
    """Half of the present one, or the next below that fits the batch; None where it cannot be smaller."""
    half = micro_batch(train, weights) // 2
    return max(_divisors(world_batch(train, len(weights)), half), default=None)


def _check_fits(size: int, batch: int, world_size: int) -> None:
    if batch % size == 0 and batch // size >= world_size:
        return
    fitting = [divisor for divisor in _divisors(batch, MICRO_BATCH_CAP) if batch // divisor >= world_size]
    nearest = min(fitting, key=lambda divisor: abs(divisor - size))
    raise ConfigError(
        f"a global batch of {batch} sequences cannot be dealt to {world_size} ranks in micro-batches of {size}",
        why="shares are whole micro-batches of one shape, at least one for every rank",
        fix=f"use --set train.micro_batch={nearest}, or leave it out",
    )


def _least_work(batch: int, sizes: Sequence[int], weights: Sequence[float]) -> int:
    return min(sizes, key=lambda size: (_busiest(batch, size, weights), -size))


def _busiest(batch: int, size: int, weights: Sequence[float]) -> float:
    """Work of the rank that is done last, in sequences of a rank of weight 1; infinite where one would have none."""
    count = batch // size
    if count < len(weights):
        return float("inf")
    if len(set(weights)) == 1:
        return math.ceil(count / len(weights)) / weights[0] * (size + _OVERHEAD_SEQUENCES)
    dealt = zip(shares(count, weights), weights, strict=True)
    return max(share / weight for share, weight in dealt) * (size + _OVERHEAD_SEQUENCES)


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]

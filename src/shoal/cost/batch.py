"""How a step's batch is sized and cut: the world's batch, the micro-batch, the learning rate that goes with it."""

from __future__ import annotations

from shoal.config.schema import TrainConfig
from shoal.errors import ConfigError

# A micro-batch costs a fixed amount of dispatch beside its arithmetic; about two sequences' worth on small models.
_OVERHEAD_SEQUENCES = 2
_MICRO_BATCH_CAP = 64


def world_batch(train: TrainConfig, world_size: int) -> int:
    """Sequences per step of the whole world: the stated batch, or that per rank when scaling is weak."""
    return train.global_batch * (world_size if train.scaling == "weak" else 1)


def scaled_lr(train: TrainConfig, world_size: int) -> float:
    """Linear scaling from the batch the rate was tuned for."""
    return train.lr * world_batch(train, world_size) / train.base_batch


def micro_batch(train: TrainConfig, world_size: int) -> int:
    """The stated micro-batch if it fits, otherwise the one that leaves the busiest rank the least work."""
    batch = world_batch(train, world_size)
    if batch < world_size:
        raise ConfigError(
            f"{world_size} ranks cannot share a global batch of {batch} sequences",
            why="every rank needs at least one sequence in each step",
            fix=f"use --global-batch {world_size} or more, or fewer ranks",
        )
    if train.micro_batch is None:
        return min(_divisors(batch), key=lambda size: (_busiest(batch, size, world_size), -size))
    _check_fits(train.micro_batch, batch, world_size)
    return train.micro_batch


def _check_fits(size: int, batch: int, world_size: int) -> None:
    if batch % size == 0 and batch // size >= world_size:
        return
    fitting = [divisor for divisor in _divisors(batch) if batch // divisor >= world_size]
    nearest = min(fitting, key=lambda divisor: abs(divisor - size))
    raise ConfigError(
        f"a global batch of {batch} sequences cannot be dealt to {world_size} ranks in micro-batches of {size}",
        why="shares are whole micro-batches of one shape, at least one for every rank",
        fix=f"use --micro-batch {nearest}, or leave it out",
    )


def _busiest(batch: int, size: int, world_size: int) -> float:
    """Work of the rank with the most micro-batches, in sequences; infinite where a rank would have none."""
    count = batch // size
    if count < world_size:
        return float("inf")
    return -(-count // world_size) * (size + _OVERHEAD_SEQUENCES)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, _MICRO_BATCH_CAP) + 1) if number % size == 0]

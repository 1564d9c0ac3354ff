"""What a rank keeps in memory while it trains, whether it fits, and what to do when it does not."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields

from shoal.config.schema import Config
from shoal.config.sync_choice import SYNC_METHODS, join_or
from shoal.cost.batch_plan import half_micro_batch, micro_batch, rank_weights
from shoal.cost.model_size import activation_bytes
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import Workload
from shoal.errors import ConfigError

_FLOAT_BYTES = 4
# The interpreter with torch, and what the allocator and the system need.
PROCESS_BYTES = 600e6
# A machine whose memory is completely full swaps.
USABLE = 0.9

OUT_OF_MEMORY_ADVICE = "use a smaller --micro-batch or --seq-len, or divide the state by --sync zero1, zero2 or zero3"


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one rank."""

    weights: float
    gradients: float
    moments: float
    copies: float  # error feedback, an fp32 copy of 16-bit weights, the outer optimizer's parameters
    activations: float

    @property
    def total(self) -> float:
        return PROCESS_BYTES + sum(float(getattr(self, field.name)) for field in fields(self))


def needed(workload: Workload, strategy: SyncStrategy, micro_batch: int, world_size: int) -> MemoryNeed:
    """Return what a rank needs. With DDP every rank keeps everything; only sharding divides it."""
    size, element = workload.parameters, workload.gradient_bytes
    is_sharded = strategy.sync == "sharded"
    share = 1 / world_size if is_sharded else 1.0
    master_bytes = _FLOAT_BYTES if element < _FLOAT_BYTES else 0
    gathered = 0.0
    if is_sharded:
        # Two layers with all their weights and gradients: the current one, and the one that is fetched meanwhile.
        largest = max(gradient.parameters for gradient in workload.gradients())
        gathered = 2.0 * element * max(largest, size / workload.shape.layers)
    return MemoryNeed(
        weights=share * element * size,
        gradients=share * element * size,
        moments=share * 2 * _FLOAT_BYTES * size,
        copies=share * (copied_bytes(strategy) + master_bytes) * size + gathered,
        activations=activation_bytes(workload.shape, micro_batch, element),
    )


def copied_bytes(strategy: SyncStrategy) -> int:
    """Return the bytes per parameter that error feedback and the outer optimizer add."""
    copies = strategy.format.has_error_feedback + SYNC_METHODS[strategy.sync].outer_copies
    return _FLOAT_BYTES * copies


def fits(memory: MemoryNeed, available_bytes: float) -> bool:
    return memory.total <= USABLE * available_bytes


def largest_micro_batch(workload: Workload, strategy: SyncStrategy, world_size: int, available_bytes: float) -> int:
    """Return how many sequences at once a rank has room for; 0 where not even the model fits."""

    def is_too_much(sequences: int) -> bool:
        return not fits(needed(workload, strategy, sequences, world_size), available_bytes)

    one, two = (needed(workload, strategy, sequences, world_size).total for sequences in (1, 2))
    most = 1 + int(available_bytes / (two - one))
    return max(0, bisect_left(range(1, most + 1), True, key=is_too_much))


def out_of_memory_advice(config: Config, ranks: int) -> str:
    """Return what to type when a rank ran out of memory. Activations grow with the micro-batch, and the training does
    not depend on it, so that is reduced first."""
    try:
        weights = rank_weights(config.run, ranks)
    except ConfigError:
        # Machines joined or left since the weights were given.
        return OUT_OF_MEMORY_ADVICE
    half = half_micro_batch(config.train, weights)
    if half is None:
        advice = f"start a new run with a shorter --seq-len than {config.model.seq_len}: the micro-batch is 1 already"
    else:
        present = micro_batch(config.train, weights)
        advice = f"start a new run with a smaller micro-batch: --micro-batch {half} (it was {present})"
    level = SYNC_METHODS[config.sync.mode].shard_level
    methods = tuple(method.name for method in SYNC_METHODS.values() if method.shard_level > level)
    if ranks == 1 or not methods:
        return advice
    return f"{advice}\nor divide what every rank keeps among the machines: --sync {join_or(methods)}"

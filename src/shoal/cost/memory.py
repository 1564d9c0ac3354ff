"""What a rank keeps in memory while it trains, and whether it fits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields

from shoal.config.schema import Config
from shoal.cost.batch_plan import half_micro_batch, micro_batch, rank_weights
from shoal.cost.buckets import Lever
from shoal.cost.model_size import activation_bytes
from shoal.cost.workload import Workload
from shoal.errors import ConfigError

_FLOAT_BYTES = 4
# The interpreter with torch in it, and what the allocator and the system want beside.
PROCESS_BYTES = 600e6
# A machine whose memory is full to the last byte swaps.
USABLE = 0.9


@dataclass(frozen=True)
class MemoryNeed:
    """`copies` is what a lever adds: error feedback, a master copy of halves, the outer optimizer's weights."""

    weights: float
    gradients: float
    moments: float
    copies: float
    activations: float

    @property
    def total(self) -> float:
        return PROCESS_BYTES + sum(float(getattr(self, field.name)) for field in fields(self))


def needed(workload: Workload, lever: Lever, micro_batch: int, world_size: int) -> MemoryNeed:
    """By DDP every rank keeps everything, however many there are; only sharding divides it."""
    size, element = workload.parameters, workload.gradient_bytes
    part = 1 / world_size if lever.sync == "sharded" else 1.0
    return MemoryNeed(
        weights=part * element * size,
        gradients=part * element * size,
        moments=part * 2 * _FLOAT_BYTES * size,
        copies=part * (copied_bytes(lever) + _master_bytes(element)) * size + _gathered(workload, lever),
        activations=activation_bytes(workload.shape, micro_batch, element),
    )


def fits(memory: MemoryNeed, available_bytes: float) -> bool:
    return memory.total <= USABLE * available_bytes


def largest_micro_batch(workload: Workload, lever: Lever, world_size: int, available_bytes: float) -> int:
    """How many sequences at once a rank has room for; 0 where not even the model fits."""

    def is_too_much(sequences: int) -> bool:
        return not fits(needed(workload, lever, sequences, world_size), available_bytes)

    each = needed(workload, lever, 2, world_size).total - needed(workload, lever, 1, world_size).total
    most = 1 + int(available_bytes / each)
    return max(0, bisect_left(range(1, most + 1), True, key=is_too_much))


def copied_bytes(lever: Lever) -> int:
    """A parameter. What a coarse format left out is kept for the next step; whoever exchanges weights keeps those of
    the last exchange, DiLoCo also the momentum of its outer optimizer."""
    feedback = _FLOAT_BYTES if lever.wire in ("int8", "powersgd") else 0
    outer = {"local": 1, "diloco": 2, "streaming": 2}.get(lever.sync, 0) * _FLOAT_BYTES
    return feedback + outer


def _master_bytes(element: int) -> int:
    """Halves are updated in a float copy."""
    return _FLOAT_BYTES if element < _FLOAT_BYTES else 0


def _gathered(workload: Workload, lever: Lever) -> float:
    """Two layers with all their weights and gradients: the one at work, and the one that is fetched meanwhile."""
    if lever.sync != "sharded":
        return 0.0
    largest = max(gradient.parameters for gradient in workload.gradients())
    return 2.0 * workload.gradient_bytes * max(largest, workload.parameters / workload.shape.layers)


# SECTION cost/relief
# What to type when a rank ran out of memory.


RELIEF = "use a smaller --micro-batch or --seq-len"


def relief(config: Config, ranks: int) -> str:
    """Activations grow with the micro-batch and the training does not depend on it, so that is the first to shrink."""
    try:
        weights = rank_weights(config.run, ranks)
    except ConfigError:
        # Machines have come or gone since the weights were given.
        return RELIEF
    half = half_micro_batch(config.train, weights)
    if half is None:
        return f"start a new run with a shorter --seq-len than {config.model.seq_len}: the micro-batch is 1 already"
    present = micro_batch(config.train, weights)
    return f"start a new run with a smaller micro-batch: --micro-batch {half} (it was {present})"

"""What a rank keeps in memory while it trains, whether it fits, and what to do when it does not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from shoal.config.schema import Config
from shoal.config.sync_choice import SYNC_METHODS, join_or
from shoal.cost.batch_plan import half_micro_batch, micro_batch, rank_weights
from shoal.cost.model_size import head_elements
from shoal.cost.sharding import held_fractions, part_shares
from shoal.cost.strategy import SyncStrategy, is_encoded, strategy_of_config
from shoal.cost.workload import Workload, workload_of
from shoal.errors import ConfigError
from shoal.units import format_si

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
    buffers: float  # error feedback, fp32 copies of weights, the outer optimizer's parameters, gathered layers
    activations: float

    @cached_property
    def total(self) -> float:
        return PROCESS_BYTES + sum(float(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class RankMemory:
    """What a rank needs, and what it has."""

    need: MemoryNeed
    available_bytes: float
    part: float  # of the divided state that the rank owns; 1 where nothing is divided

    @property
    def fits(self) -> bool:
        return fits(self.need, self.available_bytes)

    @property
    def filled(self) -> float:
        return self.need.total / self.available_bytes


def needed(
    workload: Workload, strategy: SyncStrategy, micro_batch: int, world_size: int, held: float | None = None
) -> MemoryNeed:
    """Return what a rank needs. With DDP every rank keeps everything; sharded methods divide it.

    `held` is the fraction of the divided state that the rank keeps, copies included; None: all parts are equal.
    """
    size, element = workload.parameters, workload.gradient_bytes
    level = strategy.in_world(world_size).shard_level
    if held is None:
        held = (1 + strategy.copies_in(world_size)) / world_size
    moments, gradients, weights = (held if level >= least else 1.0 for least in (1, 2, 3))
    buffers = float(copied_bytes(strategy))
    if element < _FLOAT_BYTES or (level in (1, 2) and is_encoded(strategy, workload)):
        # An update needs exact weights, and not those that were rounded for computing or for sending.
        buffers += moments * _FLOAT_BYTES
    return MemoryNeed(
        weights=weights * element * size,
        gradients=gradients * element * size,
        moments=moments * 2 * _FLOAT_BYTES * size,
        buffers=buffers * size + (gathered_bytes(workload) if level == 3 else 0.0),
        activations=workload.activation_bytes(micro_batch),
    )


def gathered_bytes(workload: Workload) -> float:
    """Return what `zero3` holds of other ranks' parts: weights and gradients of the current layer and of the one that
    is fetched meanwhile, and the weights of the largest unit. A tied embedding stays from forward to backward."""
    embedding = head_elements(workload.shape)
    layer = max(0.0, (workload.parameters - embedding) / workload.shape.layers)
    return workload.gradient_bytes * (2 * 2 * layer + max(layer, embedding))


def rank_memories(
    workload: Workload, strategy: SyncStrategy, micro_batch: int, available: Sequence[float], copy_shift: int = 1
) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, given what each of them has. Parts follow it where it is short."""
    world_size = len(available)
    if not strategy.in_world(world_size).shard_level:
        need = needed(workload, strategy, micro_batch, world_size)
        known = {size: RankMemory(need, size, 1.0) for size in set(available)}
        return tuple(known[size] for size in available)
    copies = strategy.copies_in(world_size)
    nothing, whole = (needed(workload, strategy, micro_batch, world_size, held).total for held in (0.0, 1.0))
    free = [USABLE * size for size in available]
    shares = part_shares(free, nothing, (1 + copies) * (whole - nothing))
    held = held_fractions(shares, copies, copy_shift)
    needs = {part: needed(workload, strategy, micro_batch, world_size, part) for part in set(held)}
    return tuple(RankMemory(needs[part], *own) for part, *own in zip(held, available, shares, strict=True))


def copied_bytes(strategy: SyncStrategy) -> int:
    """Return the bytes per parameter that error feedback and the outer optimizer add."""
    copies = strategy.format.has_error_feedback + SYNC_METHODS[strategy.sync].outer_copies
    return _FLOAT_BYTES * copies


def fits(memory: MemoryNeed, available_bytes: float) -> bool:
    return memory.total <= USABLE * available_bytes


def largest_micro_batch(workload: Workload, strategy: SyncStrategy, available: Sequence[float]) -> int:
    """Return how many sequences at once every rank has room for; 0 where not even the model fits."""

    def is_too_much(sequences: int) -> bool:
        return not all(memory.fits for memory in rank_memories(workload, strategy, sequences, available))

    one, two = map(workload.activation_bytes, (1, 2))
    most = 1 + int(min(available) / (two - one))
    return max(0, bisect_left(range(1, most + 1), True, key=is_too_much))


def sharded_memory(config: Config, ranks: int) -> str:
    """Return the line about the memory of a rank that is printed before a sharded training; empty for any other."""
    strategy = strategy_of_config(config.sync)
    if not strategy.in_world(ranks).shard_level:
        return ""
    workload, batch = workload_of(config), micro_batch(config.train, rank_weights(config.run, ranks))
    need, whole = (needed(workload, one, batch, ranks).total for one in (strategy, strategy.with_(sync="ddp")))
    copies = strategy.copies_in(ranks)
    kept = "; each part is on two ranks: a lost machine loses no step" if copies else ""
    return f"memory: a rank needs about {format_si(need, 'B')}, with ddp {format_si(whole, 'B')}{kept}"


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

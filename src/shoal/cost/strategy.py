"""A sync strategy: sync method, wire format, accumulation and buckets, and what its wire format costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import (
    DEFAULT_RANK,
    SYNC_METHODS,
    WIRE_FORMATS,
    SyncChoice,
    WireChoice,
    WireFormat,
    parse_wire,
)
from shoal.cost.buckets import STOCK_FIRST_MB, STOCK_MB
from shoal.cost.sharding import copies_in
from shoal.cost.workload import Workload


@dataclass(frozen=True)
class SyncStrategy:
    """What trades communication against work, memory or accuracy."""

    sync: str = "ddp"  # a method that a plan can compare
    wire: str = "fp32"
    accumulation: int = 1  # multiplies the work between two exchanges, and the global batch
    every: int = 1  # steps from one exchange of parameters to the next; 1 for the other methods
    rank: int = DEFAULT_RANK  # of a low-rank wire format
    bucket_mb: float | None = None  # unset: follows the model's size
    first_bucket_mb: float | None = None  # stock DDP has a smaller first bucket
    overlap: bool = True  # off with `sync.measure=barrier`
    hierarchical: bool = False  # all-reduce inside each node before the exchange between nodes
    balanced: bool = False  # divide a batch by speed instead of evenly
    copies: int | None = None  # of each part of a sharded method; unset: as many as `copies_in`

    def with_(self, **changes: object) -> SyncStrategy:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def format(self) -> WireFormat:
        return WIRE_FORMATS[self.wire]

    @property
    def wire_setting(self) -> str:
        """The value of `sync.wire`."""
        return str(WireChoice(self.wire, self.rank))

    @property
    def keeps_training(self) -> bool:
        """Whether it trains as one machine would, except for rounding: gradients of all ranks are exchanged in every
        step, and nothing is dropped. What int8 leaves out of one step it adds to the next; PowerSGD needs many."""
        return not SYNC_METHODS[self.sync].is_outer and self.format.keeps_training

    @property
    def shard_level(self) -> int:
        return SYNC_METHODS[self.sync].shard_level

    def in_world(self, world_size: int) -> SyncStrategy:
        """Return what it is with this many ranks: one rank alone divides nothing."""
        return self.with_(sync="ddp") if self.shard_level and world_size == 1 else self

    def copies_in(self, world_size: int) -> int:
        return copies_in(world_size, self.copies) if self.shard_level else 0

    @property
    def is_available(self) -> bool:
        return self.format.is_available

    def __str__(self) -> str:
        """Return for example `ddp, fp16, batch ×4`: the sync method, then what differs from plain DDP."""
        words = [self.sync if self.every == 1 else f"{self.sync} every {self.every} steps"]
        if self.wire != "fp32":
            words.append(f"{self.wire} rank {self.rank}" if self.format.is_low_rank else self.wire)
        if self.shard_level and self.copies is not None:
            words.append("with copies" if self.copies else "no copies")
        if self.accumulation > 1:
            words.append(f"batch ×{self.accumulation}")
        words += [name for name in ("balanced", "hierarchical") if getattr(self, name)]
        return ", ".join(words + ([] if self.overlap else ["no overlap"]))


def strategy_of_config(sync: SyncConfig) -> SyncStrategy:
    """Return the strategy that the configuration asks for."""
    if sync.mode == "stock":
        return SyncStrategy(bucket_mb=STOCK_MB, first_bucket_mb=STOCK_FIRST_MB, accumulation=sync.accumulate)
    return strategy_of_choice(sync.expected_choice).with_(
        accumulation=sync.accumulate,
        bucket_mb=sync.bucket_mb,
        overlap=sync.measure != "barrier",
        copies=sync.copies,
    )


def strategy_of_choice(choice: SyncChoice) -> SyncStrategy:
    wire = parse_wire(choice.wire)
    return SyncStrategy(sync=choice.mode, wire=wire.name, rank=wire.rank, every=choice.every)


# The cost of a wire format


def is_encoded(strategy: SyncStrategy, workload: Workload) -> bool:
    """Return whether gradients are encoded: 16-bit gradients gain nothing from a 16-bit format."""
    return strategy.format.is_low_rank or strategy.format.number_bytes < workload.gradient_bytes


def bytes_per_parameter(strategy: SyncStrategy, workload: Workload) -> float:
    """Return the average over the model. PowerSGD sends the factors of all matrices, and vectors as they are."""
    if strategy.format.is_low_rank:
        return workload.gradient_bytes * _low_rank_fraction(strategy.rank, workload)
    return min(float(workload.gradient_bytes), strategy.format.number_bytes)


def element_bytes(strategy: SyncStrategy, workload: Workload) -> float:
    """Return the bytes of a number that is added up on the way; a fraction where a block carries a scale."""
    is_low_rank = strategy.format.is_low_rank
    return workload.gradient_bytes if is_low_rank else bytes_per_parameter(strategy, workload)


def cpu_encode_s(strategy: SyncStrategy, parameters: int, threads: float) -> float:
    """Return the time to encode and decode all parameters, divided among the threads."""
    return strategy.format.thread_s * parameters / threads


def _low_rank_fraction(rank: int, workload: Workload) -> float:
    """A matrix of n by m is sent as rank·(n+m) numbers, unless that is more."""
    shape, width = workload.shape, workload.shape.width
    block = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    matrices = [*block * shape.layers, (shape.vocab_size, width), (shape.seq_len, width)]
    full = sum(rows * columns for rows, columns in matrices)
    low_rank = sum(min(rows * columns, rank * (rows + columns)) for rows, columns in matrices)
    vectors = 13 * width * shape.layers + 2 * width
    return (low_rank + vectors) / (full + vectors)

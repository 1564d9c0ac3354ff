"""Levers: the choices that trade communication against work, memory or accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.config.schema import SyncConfig
from shoal.config.wire import DEFAULT_RANK, WireName, parse_wire
from shoal.cost.buckets import STOCK_FIRST_MB, STOCK_MB

Sync = Literal["ddp", "local", "diloco", "streaming", "sharded"]

# What a training can be told to do today. Whoever builds one of the others changes its line here, and plans offer it.
AVAILABLE = {
    "ddp": True,
    "local": True,
    "diloco": True,
    "streaming": True,
    "sharded": False,
    "fp32": True,
    "fp16": True,
    "bf16": True,
    "int8": True,
    "powersgd": True,
    "accumulation": True,
    "balanced": True,
    "hierarchical": True,
}


@dataclass(frozen=True)
class Lever:
    """One way to synchronise. `accumulation` multiplies the work between two exchanges, and with it the global batch.

    `every` is the number of steps from one outer exchange to the next (LocalSGD and DiLoCo; 1 for the others),
    `rank` is PowerSGD's. `bucket_mb` unset follows the model's size; plain DDP has a smaller first one. `overlap` off
    is what `sync.measure=barrier` does. `hierarchical` sums up inside each node before it goes between them. `balanced`
    deals a batch by speed instead of evenly.
    """

    sync: Sync = "ddp"
    wire: WireName = "fp32"
    accumulation: int = 1
    every: int = 1
    rank: int = DEFAULT_RANK
    bucket_mb: float | None = None
    first_bucket_mb: float | None = None
    overlap: bool = True
    hierarchical: bool = False
    balanced: bool = False

    def with_(self, **changes: object) -> Lever:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[str, ...]:
        """What of it has a line in `AVAILABLE`."""
        chosen = {
            "accumulation": self.accumulation > 1,
            "balanced": self.balanced,
            "hierarchical": self.hierarchical,
        }
        return (self.sync, self.wire, *(name for name, is_on in chosen.items() if is_on))

    @property
    def wire_setting(self) -> str:
        """As `sync.wire` has it."""
        return self.wire if self.wire != "powersgd" else f"powersgd:{self.rank}"

    @property
    def keeps_training(self) -> bool:
        """Whether it trains as one machine would, but for rounding: gradients of all ranks in every step, nothing left
        out for good. What int8 cannot say in one step it says in the next; PowerSGD needs many to say it."""
        return self.sync in ("ddp", "sharded") and self.wire != "powersgd"

    @property
    def is_available(self) -> bool:
        return all(AVAILABLE[part] for part in self.parts)

    def __str__(self) -> str:
        """`ddp, fp16, batch ×4`: what differs from plain DDP, after the way to synchronise."""
        words = [self.sync if self.every == 1 else f"{self.sync} every {self.every} steps"]
        words += [self.wire if self.wire != "powersgd" else f"powersgd rank {self.rank}"] if self.wire != "fp32" else []
        words += [f"batch ×{self.accumulation}"] if self.accumulation > 1 else []
        words += [name for name in ("balanced", "hierarchical") if name in self.parts]
        return ", ".join(words + ([] if self.overlap else ["no overlap"]))


def lever_of(sync: SyncConfig) -> Lever:
    """What the configuration asks for."""
    if sync.mode == "stock":
        return Lever(bucket_mb=STOCK_MB, first_bucket_mb=STOCK_FIRST_MB, accumulation=sync.accumulate)
    choice = sync.foreseen
    wire = parse_wire(choice.wire)
    return Lever(
        sync=choice.mode,
        wire=wire.name,
        rank=wire.rank,
        accumulation=sync.accumulate,
        every=choice.every,
        bucket_mb=sync.bucket_mb,
        overlap=sync.measure != "barrier",
    )

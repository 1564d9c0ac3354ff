"""Levers: the choices that trade communication against work, memory or accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WireName = Literal["fp32", "fp16", "bf16", "int8", "powersgd"]
Sync = Literal["ddp", "local", "diloco", "streaming", "sharded"]

BUCKET_MB = 25.0


@dataclass(frozen=True)
class Lever:
    """One way to synchronise. `accumulation` multiplies the work between two exchanges, and with it the global batch.

    `every` is the number of steps from one outer exchange to the next (LocalSGD and DiLoCo; 1 for the others),
    `rank` is PowerSGD's. `overlap` off is what `sync.measure=barrier` does.
    """

    sync: Sync = "ddp"
    wire: WireName = "fp32"
    accumulation: int = 1
    every: int = 1
    rank: int = 4
    bucket_mb: float = BUCKET_MB
    overlap: bool = True

    def with_(self, **changes: object) -> Lever:
        return replace(self, **changes)  # type: ignore[arg-type]

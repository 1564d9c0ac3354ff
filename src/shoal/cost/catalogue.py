"""Links and machines by name, each figure with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Machine:
    """`mfu` is the part of its matrix peak that training reaches, `layer_s` what starting the operations of one layer
    takes beside them, `spread` how much a step's time varies from one to the next (standard deviation, relative)."""

    name: str
    kind: Literal["cpu", "gpu"]
    cores: int
    fp32_flops: float
    bf16_flops: float
    mfu: float
    memory_bytes: float
    memory_bytes_per_s: float
    source: str
    layer_s: float = 0.0
    spread: float = 0.02

    def peak_flops(self, gradient_bytes: int) -> float:
        """A model whose gradients are halves computes in halves."""
        return self.bf16_flops if gradient_bytes == 2 else self.fp32_flops

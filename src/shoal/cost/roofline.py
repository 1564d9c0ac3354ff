"""The roofline: what limits a computation, its arithmetic or the memory it reads from?"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.profile import Bound, ComputeProfile
from shoal.units import format_number

# A program this far below both roofs is held up by something else: dispatching many small operations, or other load.
_FAR_BELOW = 0.25


@dataclass(frozen=True)
class Roofline:
    peak_gflops: float
    memory_gbytes_per_s: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic is the limit."""
        return self.peak_gflops / self.memory_gbytes_per_s

    def roof_gflops(self, intensity: float) -> float:
        return min(self.peak_gflops, intensity * self.memory_gbytes_per_s)

    def bound(self, intensity: float, gflops: float) -> Bound:
        if gflops < _FAR_BELOW * self.roof_gflops(intensity):
            return "overhead"
        return "memory" if intensity < self.ridge else "arithmetic"


def roofline_of(compute: ComputeProfile) -> Roofline:
    return Roofline(compute.fp32_gflops, compute.memory_gbytes_per_s)


def explain(name: str, compute: ComputeProfile) -> str:
    roof, best = roofline_of(compute), compute.best
    reached = best.gflops / roof.roof_gflops(compute.intensity)
    threads = f"{best.threads} thread" + ("s" if best.threads > 1 else "")
    point = f"the small GPT reaches {format_number(best.gflops)} GFLOP/s with {threads}, {reached:.0%} of its roof"
    ridge = f"{compute.intensity:.3g} operations a byte, and from {roof.ridge:.3g} on arithmetic is the limit"
    match compute.bound:
        case "arithmetic":
            verdict = f"bound by arithmetic: it does {ridge}"
        case "memory":
            verdict = f"bound by memory: it does only {ridge}"
        case "overhead":
            verdict = "bound by neither: many small operations, or other programs, take the time"
    return f"{name}: {point}; {verdict}"

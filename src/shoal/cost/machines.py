"""How fast a machine computes: the protocol of all speed models, and the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.config.profile import Bound, ComputeProfile
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import RankWork, Workload
from shoal.units import format_number, format_percent, pluralize

# A program this far below both roofs is limited by something else: dispatching many small operations, or other load.
_FAR_BELOW = 0.25
# A training is never faster than the products of large matrices alone, but for noise.
_MOST_ABOVE = 1.1


class Speed(Protocol):
    def in_world(self, world_size: int) -> Speed:
        """Return the same machines with this many ranks; ranks of one machine slow each other down."""
        ...

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        """Return what `rank` computes in a step of `micro_batches`, each of `micro_batch` sequences."""
        ...

    def encode_s(self, strategy: SyncStrategy, rank: int, parameters: int) -> float:
        """Return the time that the rank takes to encode and decode all gradients."""
        ...

    def memory_bytes(self, rank: int) -> float:
        """Return the memory that the rank may fill."""
        ...


@runtime_checkable
class HasKinds(Protocol):
    """A speed model that knows which of its ranks are equal, so that one of sixteen thousand is computed for all."""

    def kind(self, rank: int) -> int: ...


def rank_kinds(speed: Speed, world_size: int) -> list[int]:
    """Return a number per rank; ranks with the same number are equally fast."""
    return [speed.kind(rank) for rank in range(world_size)] if isinstance(speed, HasKinds) else list(range(world_size))


@dataclass(frozen=True)
class Roofline:
    """What limits a computation: arithmetic, or the memory it reads from."""

    peak_gflops: float
    memory_gbytes_per_s: float

    @property
    def ridge(self) -> float:
        """Operations per byte above which arithmetic is the limit."""
        return self.peak_gflops / self.memory_gbytes_per_s

    def roof_gflops(self, intensity: float) -> float:
        return min(self.peak_gflops, intensity * self.memory_gbytes_per_s)

    def is_plausible(self, gflops: float) -> bool:
        """Return whether a training can have this rate. It may exceed the memory's roof, since caches serve it too."""
        return gflops <= _MOST_ABOVE * self.peak_gflops

    def bound(self, intensity: float, gflops: float) -> Bound:
        if gflops < _FAR_BELOW * self.roof_gflops(intensity):
            return "overhead"
        return "memory" if intensity < self.ridge else "arithmetic"


def roofline_of(compute: ComputeProfile) -> Roofline:
    return Roofline(compute.fp32_gflops, compute.memory_gbytes_per_s)


def explain_roofline(name: str, compute: ComputeProfile) -> str:
    """Return a sentence about what limits training on a machine."""
    roof, best = roofline_of(compute), compute.best
    part = best.gflops / roof.roof_gflops(compute.intensity)
    reached = f"{format_percent(part)} of its roof" if part <= 1 else "all that its roof allows"
    threads = pluralize(best.threads, "thread")
    point = f"the small GPT reaches {format_number(best.gflops)} GFLOP/s with {threads}, {reached}"
    ridge = f"{compute.intensity:.3g} operations a byte, and from {roof.ridge:.3g} on arithmetic is the limit"
    match compute.bound:
        case "arithmetic":
            verdict = f"bound by arithmetic: it does {ridge}"
        case "memory":
            verdict = f"bound by memory: it does only {ridge}"
        case "overhead":
            verdict = "bound by neither: many small operations, or other programs, take the time"
    return f"{name}: {point}; {verdict}"

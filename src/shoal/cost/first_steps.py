"""What the first steps of a run say of all others: how long one takes, and how much of that is the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

# DDP arranges its buckets after the first step, and caches fill in the second.
WARM_UP_STEPS = 2
_MEASURED_STEPS = 4
# Over a slow link a single step may take a minute, and tells enough.
_BUDGET_S = 30.0


@dataclass(frozen=True)
class RankStep:
    """One step of DDP on one rank. For `exposed_s` it stood still for the exchange, which was under way for
    `allreduce_s` in all, for `wait_s` because another rank was late."""

    step_s: float
    exposed_s: float
    wait_s: float
    allreduce_s: float

    @property
    def own_s(self) -> float:
        return self.step_s - self.exposed_s - self.wait_s


@dataclass(frozen=True)
class FirstSteps:
    """A typical one of them, on the rank that everybody waits for. `own_s` is what a rank takes at most that waits
    for nobody: its good steps and its bad ones even out."""

    step_s: float
    exposed_s: float
    allreduce_s: float
    own_s: float


def is_enough(steps: Sequence[Sequence[RankStep]]) -> bool:
    """Whether these steps of all ranks, warm-up aside, tell what one takes."""
    return len(steps) >= _MEASURED_STEPS or sum(slowest(ranks).step_s for ranks in steps) > _BUDGET_S


def slowest(ranks: Sequence[RankStep]) -> RankStep:
    """Whoever waited least was waited for, and saw nothing but the exchange."""
    return min(ranks, key=lambda rank: rank.wait_s)


def typical(steps: Sequence[Sequence[RankStep]]) -> FirstSteps:
    def middle(of: Callable[[RankStep], float]) -> float:
        return median(of(slowest(ranks)) for ranks in steps)

    step_s, exposed_s = middle(lambda rank: rank.step_s), middle(lambda rank: rank.exposed_s)
    own_s = max(median(step.own_s for step in rank) for rank in zip(*steps, strict=True))
    return FirstSteps(step_s, exposed_s, middle(lambda rank: rank.allreduce_s), min(own_s, step_s - exposed_s))

"""The time of one step: computing, the exchange behind backward, and what of it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cost.buckets import Bucket
from shoal.cost.network import Exchange

# What a thread of the exchange gets of a core that another thread computes on.
_FAIR = 0.5


@dataclass(frozen=True)
class RankWork:
    """What one rank computes in a step. Times are of one micro-batch; `spare_cores` idle while it computes on
    `busy_cores`: the exchange takes those first. `spread` is how much its time varies from step to step: standard
    deviation, relative."""

    micro_batches: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float = 0.0
    busy_cores: float = 1.0
    spare_cores: float = 0.0
    spread: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.micro_batches * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class StepTime:
    """Of the rank that everybody waits for. `comm_s` is how long all exchanges would take by themselves, `exposed_s`
    how long the rank stands still for them or is slowed down by them; what adds up to `step_s` are the others. For
    `latency_s` of `comm_s` messages wait, however few bytes they have."""

    compute_s: float
    comm_s: float
    exposed_s: float
    wait_s: float
    optimizer_s: float
    other_s: float
    latency_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.wait_s + self.optimizer_s + self.other_s


def exposed_s(
    work: RankWork, buckets: Sequence[Bucket], exchange: Callable[[Bucket], Exchange], overlap: bool
) -> float:
    """How much later backward ends because of the exchange.

    One bucket after another, each as soon as it is ready and the one before is through, while backward goes on. Both
    want the same cores where none is spare: then each of them is slower.
    """
    costs = [exchange(bucket) for bucket in buckets]
    if not overlap:
        return sum(cost.seconds for cost in costs)
    now = computed = 0.0
    for bucket, cost in zip(buckets, costs, strict=True):
        ready = bucket.ready * work.backward_s
        if computed < ready:
            now += ready - computed
            computed = ready
        speed, slowed = _rates(work, cost)
        takes = cost.seconds / speed
        if slowed < 1 and computed + takes * slowed > work.backward_s:
            # Backward ends first; from then on the exchange has the cores to itself.
            together = (work.backward_s - computed) / slowed if slowed else 0.0
            takes = together + (cost.seconds - together * speed)
        computed = min(work.backward_s, computed + takes * slowed)
        now += takes
    return now + (work.backward_s - computed) - work.backward_s


def _rates(work: RankWork, cost: Exchange) -> tuple[float, float]:
    """How fast the exchange and backward go on while both are under way, each against being alone."""
    missing = cost.cores - work.spare_cores
    if missing <= 0 or not cost.cores:
        return 1.0, 1.0
    granted = min(missing, _FAIR * work.busy_cores)
    return (work.spare_cores + granted) / cost.cores, 1 - granted / work.busy_cores

"""The likely cause of a late rank, from values captured on emulated nodes."""

from __future__ import annotations

import pytest

from shoal.cost.causes import UNKNOWN, RankTimes, find_cause
from shoal.host.node_stats import NodeStats

STEP_S = 0.3
ON_TIME = RankTimes(0.1, data_s=0.001, starved=0.2, node=NodeStats(other_cores=0.1, memory_stall=0.02, clock=0.9))


def late(data_s: float = 0.001, gc_s: float = 0.0, starved: float = 0.2, **node: float) -> RankTimes:
    return RankTimes(0.28, data_s, gc_s, starved, NodeStats(**{"clock": 0.9, **node}))


@pytest.mark.parametrize(
    ("rank", "kind", "evidence"),
    [
        (late(data_s=0.153), "data", "loading data takes 153 ms"),
        (late(gc_s=0.12), "garbage collection", "collects garbage for 120 ms"),
        # A group without quota also waits for a processor: the quota is the cause.
        (late(throttled=0.42, starved=0.7), "CPU quota", "for 42% of the time"),
        (late(frozen=0.34), "freezes", "stands still for 34% of the time"),
        (late(major_faults=2400, memory_stall=0.5), "memory", "2,400 pages a second"),
        (late(other_cores=1.2, starved=0.8), "other programs", "yes (process 7)"),
        (late(starved=0.8), "processor time", "waits for a processor 80% of the time"),
        (late(clock=0.4, heat=3.0), "clock", "because of heat"),
        (late(clock=0.4, on_battery=1.0), "clock", "power cable is out"),
        (late(steal=0.5), "steal", "hypervisor"),
        (late(), UNKNOWN, "nothing that is measured"),
        # Too little to explain being 180 ms late.
        (late(data_s=0.02, gc_s=0.01, throttled=0.05), UNKNOWN, "nothing that is measured"),
        # Others have it too, so it is not why this one is late.
        (late(memory_stall=0.03, other_cores=0.2), UNKNOWN, "nothing that is measured"),
    ],
)
def test_the_cause_that_explains_the_lateness_is_named(rank: RankTimes, kind: str, evidence: str) -> None:
    cause = find_cause(rank, [ON_TIME, ON_TIME], rank.ready_s - ON_TIME.ready_s, STEP_S, "yes (process 7)")
    assert cause.kind == kind
    assert evidence in cause.evidence
    assert cause.fix


def test_a_battery_is_named_with_its_remedy() -> None:
    assert find_cause(late(clock=0.4, on_battery=1.0), [ON_TIME], 0.18, STEP_S, "").fix == "plug in its power cable"

"""The likely cause of a late rank, from values captured on emulated nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cost.causes import UNKNOWN, Demand, RankTimes, find_cause, machine_demands, other_cores_beside
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
    # The same among ranks with two threads each on two cores, which all wait for processors.
    crowd = {"wanted": 1.9, "waited": 1.0, "cpus": 2, "run_cpus": 2, "threads": 2, "machine": 1}
    late_rank, other = (replace(times, node=replace(times.node, **crowd)) for times in (rank, ON_TIME))
    same = find_cause(late_rank, [other, other], rank.ready_s - ON_TIME.ready_s, STEP_S, "yes (process 7)")
    assert (same.kind, same.evidence) == (cause.kind, cause.evidence)
    # Those that wait for the late one want less meanwhile.
    waiting = replace(other, node=replace(other.node, wanted=1.2, waited=0.6))
    late_s = rank.ready_s - ON_TIME.ready_s
    assert find_cause(late_rank, [waiting, waiting], late_s, STEP_S, "yes (process 7)").kind == (
        kind if kind != "processor time" else "oversubscription"
    )


def test_a_battery_is_named_with_its_remedy() -> None:
    assert find_cause(late(clock=0.4, on_battery=1.0), [ON_TIME], 0.18, STEP_S, "").fix == "plug in its power cable"


# 16 threads in two teams on the 8 cores that a rank is pinned to; one thread a rank and a core; three ranks on two
# cores; one thread a rank while other programs take half of the processors; four threads on two cores.
TWO_TEAMS = NodeStats(wanted=15.6, waited=7.6, cpus=8, run_cpus=16, threads=8, machine=1)
ORDINARY = NodeStats(wanted=1.1, waited=0.05, cpus=1, run_cpus=2, threads=1, machine=1)
THREE_ON_TWO = NodeStats(wanted=0.95, waited=0.33, cpus=2, run_cpus=2, threads=1, machine=1)
DISTURBED = NodeStats(wanted=1.1, waited=0.57, cpus=1, run_cpus=2, threads=1, machine=1, other_cores=1.0)
FOUR_THREADS = NodeStats(wanted=3.9, waited=2.0, cpus=2, run_cpus=2, threads=4, machine=1)


@pytest.mark.parametrize(
    ("ranks", "is_too_high"),
    [
        ([TWO_TEAMS, TWO_TEAMS], True),
        ([ORDINARY, ORDINARY], False),
        ([DISTURBED, DISTURBED], False),
        ([THREE_ON_TWO] * 2, False),
        ([THREE_ON_TWO] * 3, True),
        ([FOUR_THREADS], True),
        # A kernel without schedstat, and an event of an earlier version.
        ([NodeStats()], False),
    ],
)
def test_ranks_that_want_more_processors_than_there_are(ranks: list[NodeStats], is_too_high: bool) -> None:
    [demand] = machine_demands(ranks).values()
    assert demand.is_too_high == is_too_high


@pytest.mark.parametrize(
    ("demand", "other_cores", "is_cause"),
    [
        (Demand(7.8, 5.8, 2, ranks=2, threads=4), 1.0, True),
        (Demand(3.1, 1.1, 2, ranks=3, threads=1), 0.2, True),
        # Captured on three ranks with one thread each, beside eight busy programs.
        (Demand(4.0, 3.56, 2, ranks=3, threads=1), 1.5, False),
    ],
)
def test_other_programs_that_use_the_processors_explain_the_waiting(
    demand: Demand, other_cores: float, is_cause: bool
) -> None:
    assert demand.is_cause(other_cores) == is_cause


def test_programs_that_a_container_does_not_show_count_by_the_processors_they_keep_busy() -> None:
    """Values of three ranks on emulated nodes, beside programs that their own process tables lack."""
    hidden = NodeStats(wanted=1.4, waited=1.2, cpus=2, run_cpus=2, threads=1, machine=1, busy=2.0)
    assert other_cores_beside([hidden] * 3) == pytest.approx(1.4)
    alone = replace(hidden, wanted=1.0, waited=0.34)
    assert other_cores_beside([alone] * 3) == pytest.approx(0.02)
    assert other_cores_beside([NodeStats(other_cores=0.7)]) == 0.7


def test_ranks_of_other_machines_do_not_count() -> None:
    elsewhere = NodeStats(wanted=1.0, waited=0.0, cpus=2, run_cpus=2, threads=1, machine=2)
    demands = machine_demands([FOUR_THREADS, elsewhere, elsewhere])
    assert {machine: demand.is_too_high for machine, demand in demands.items()} == {1: True, 2: False}


@pytest.mark.parametrize(
    ("demand", "fix"),
    [
        (Demand(7.8, 5.8, 2, ranks=2, threads=4), "--threads 1"),
        (Demand(31, 15, 16, ranks=2, threads=16), "--threads 8"),
        (Demand(3.1, 1.1, 2, ranks=3, threads=1), "start at most two ranks there"),
        (Demand(15.6, 7.6, 8, threads=8), "OMP_WAIT_POLICY=passive"),
        # Captured on two emulated nodes, one with eleven threads beside its training.
        (Demand(13.5, 13.1, 2, ranks=2, threads=2), "OMP_WAIT_POLICY=passive"),
        # It was recorded by a script of which the number of threads is not known.
        (Demand(3.9, 1.9, 2), "OMP_NUM_THREADS=2"),
    ],
)
def test_the_remedy_is_the_command_to_type(demand: Demand, fix: str) -> None:
    assert fix in demand.fix


def test_a_second_team_of_threads_is_told_from_too_many_threads() -> None:
    assert Demand(15.6, 7.6, 8, threads=8).describe("its threads") == (
        "its threads want 15.6 processors and may use 8: they wait for one 49% of the time; torch computes with 8, so "
        "other threads take the rest"
    )
    assert "torch" not in Demand(7.8, 5.8, 2, ranks=2, threads=4).describe("its threads")


def crowded(node: NodeStats, starved: float = 0.7) -> RankTimes:
    return RankTimes(0.28, starved=starved, node=node)


ALONE = NodeStats(wanted=2.0, waited=0.1, cpus=2, run_cpus=2, threads=2, machine=2)


@pytest.mark.parametrize(
    ("late", "other", "kind"),
    [
        (FOUR_THREADS, ALONE, "oversubscription"),
        # On one machine, the rank that wants more than the other.
        (FOUR_THREADS, THREE_ON_TWO, "oversubscription"),
        # All want the same: something else makes this one late.
        (FOUR_THREADS, FOUR_THREADS, "processor time"),
        (ORDINARY, ALONE, "processor time"),
        # Other programs that take as much as it wants too much are named first, and those that take little are not.
        (NodeStats(**{**vars(FOUR_THREADS), "other_cores": 1.0}), ALONE, "other programs"),
        (NodeStats(**{**vars(TWO_TEAMS), "other_cores": 0.4}), ALONE, "oversubscription"),
    ],
)
def test_a_rank_that_is_late_because_of_its_own_threads(late: NodeStats, other: NodeStats, kind: str) -> None:
    on_time = RankTimes(0.1, starved=0.05, node=other)
    cause = find_cause(crowded(late), [on_time, on_time], 0.18, STEP_S, "yes (process 7)")
    assert cause.kind == kind


def test_a_quota_is_named_before_the_threads_that_use_it_up() -> None:
    late_node = NodeStats(**{**vars(FOUR_THREADS), "throttled": 0.6})
    cause = find_cause(crowded(late_node), [RankTimes(0.1, node=ALONE)], 0.18, STEP_S, "")
    assert cause.kind == "CPU quota"

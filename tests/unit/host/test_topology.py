"""Which cores ranks compute on: topologies of several machines, read from files, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.lab import as_nodes
from shoal.cluster.node import Node, Rendezvous
from shoal.config.schema import RunConfig
from shoal.engine.machine_trial import CorePins, choose_cores
from shoal.host.topology import (
    FULL_SPEED,
    Core,
    Quota,
    Topology,
    cores_for_rank,
    is_on_battery,
    read_topology,
    this_topology,
    threads_for,
)
from shoal.launch.plan import plan_ranks
from shoal.sync.world import World
from shoal_lab.spec import LabSpec, Link, NodeSpec
from tests.support.topology_trees import MACHINES, machine_topology, write_tree

# What `read_topology` should find: cores, hardware threads, speeds with their numbers of cores, cores by NUMA node.
EXPECTED = {
    "big_little": (8, 8, {462: 4, 1024: 4}, [8]),
    "desktop": (8, 16, {1024: 8}, [8]),
    "desktop_siblings_adjacent": (8, 16, {1024: 8}, [8]),
    "hybrid_laptop": (14, 20, {381: 8, 1024: 6}, [14]),
    "two_sockets": (16, 32, {1024: 16}, [8, 8]),
    "container_v1": (8, 8, {1024: 8}, [8]),
    "container_v2": (8, 8, {1024: 8}, [8]),
    "bare_vm": (2, 4, {1024: 2}, [2]),
    "cloud_vm": (2, 2, {1024: 2}, [2]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_cores_of_a_machine_are_read(machine: str, tmp_path: Path) -> None:
    topology = machine_topology(machine, tmp_path)
    cores, threads, speeds, by_node = EXPECTED[machine]
    assert (len(topology.cores), sum(len(core.cpus) for core in topology.cores)) == (cores, threads)
    assert {core.speed: sum(other.speed == core.speed for other in topology.cores) for core in topology.cores} == speeds
    nodes = sorted({core.numa_node for core in topology.cores})
    assert [sum(core.numa_node == node for core in topology.cores) for node in nodes] == by_node
    assert all(core.package == core.numa_node for core in topology.cores)
    assert topology.on_battery == (machine == "hybrid_laptop")


@pytest.mark.parametrize("machine", MACHINES)
def test_a_quota_is_read_with_the_file_that_sets_it(machine: str, tmp_path: Path) -> None:
    topology = machine_topology(machine, tmp_path)
    files = {
        "container_v2": "sys/fs/cgroup/cpu.max",
        "container_v1": "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us",
    }
    expected = Quota(2.5, str(tmp_path / files[machine])) if machine in files else None
    assert topology.quota == expected
    assert topology.usable == (2 if expected else len(topology.cores))


def test_the_lowest_quota_of_all_groups_above_counts(tmp_path: Path) -> None:
    """A unit in a slice with `CPUQuota=150%`; the unit itself may use three cores."""
    cpus = write_tree("desktop", tmp_path)
    slice_ = tmp_path / "sys/fs/cgroup/user.slice/user-1000.slice"
    (slice_ / "cpu.max").write_text("150000 100000\n")
    (slice_ / "session-2.scope").mkdir()
    (slice_ / "session-2.scope/cpu.max").write_text("300000 100000\n")
    topology = read_topology(tmp_path / "sys", tmp_path / "proc", cpus)
    assert topology.quota == Quota(1.5, str(slice_ / "cpu.max"))
    assert topology.usable == 1


@pytest.mark.parametrize("text", ["max 100000", "", "lots", "100000", "100000 0", "-1 100000", "\n"])
def test_a_file_without_a_limit_is_no_quota(text: str, tmp_path: Path) -> None:
    cpus = write_tree("container_v2", tmp_path)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text)
    assert read_topology(tmp_path / "sys", tmp_path / "proc", cpus).quota is None


def test_a_machine_without_any_file_has_a_core_for_each_hardware_thread(tmp_path: Path) -> None:
    topology = read_topology(tmp_path / "sys", tmp_path / "proc", {0, 1, 2})
    assert topology == Topology((Core((0,)), Core((1,)), Core((2,))))


@pytest.mark.parametrize(
    ("machine", "affinity", "cores"),
    [
        # taskset -c 0,2: two whole cores, each with one of its threads.
        ("desktop", {0, 2}, [(0,), (2,)]),
        # taskset -c 0,8: the two threads of one core.
        ("desktop", {0, 8}, [(0, 8)]),
        ("desktop_siblings_adjacent", {0, 1, 2}, [(0, 1), (2,)]),
        ("two_sockets", {0, 1, 2, 3}, [(0,), (2,), (1,), (3,)]),
        ("bare_vm", {1, 2, 3}, [(1,), (2, 3)]),
    ],
)
def test_only_cores_of_the_affinity_mask_count(
    machine: str, affinity: set[int], cores: list[tuple[int, ...]], tmp_path: Path
) -> None:
    topology = machine_topology(machine, tmp_path, affinity)
    assert [core.cpus for core in topology.cores] == cores
    assert threads_for(topology, 1) == len(cores)


def test_cores_of_one_kind_are_equal_although_some_have_a_higher_clock(tmp_path: Path) -> None:
    assert machine_topology("desktop_siblings_adjacent", tmp_path).core_speeds == ()


def test_cores_of_equal_capacity_are_told_apart_by_their_clock(tmp_path: Path) -> None:
    """AMD's compact cores, for instance: the same design with a lower clock."""
    cpus = write_tree("desktop", tmp_path)
    for cpu in cpus:
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").write_text("1024\n")
    for cpu in (4, 5, 6, 7):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").write_text("3300000\n")
    topology = read_topology(tmp_path / "sys", tmp_path / "proc", cpus)
    assert topology.core_speeds == (1024,) * 4 + (697,) * 4


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({"AC": {"type": "Mains", "online": "0"}}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
        # Charged through USB-C, and a desktop with a free USB-C port.
        ({"AC": {"type": "Mains", "online": "0"}, "ucsi": {"type": "USB", "online": "1"}}, False),
        ({"ucsi": {"type": "USB", "online": "0"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
        ({}, False),
    ],
)
def test_a_battery_that_feeds_the_machine_is_noticed(
    supplies: dict[str, dict[str, str]], expected: bool, tmp_path: Path
) -> None:
    for supply, files in supplies.items():
        folder = tmp_path / "class/power_supply" / supply
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    assert is_on_battery(tmp_path) == expected


# Threads


@pytest.mark.parametrize(
    ("machine", "threads_by_ranks"),
    [
        # Hardware threads of one core count once.
        ("desktop", {1: 8, 2: 4, 3: 2, 8: 1, 9: 1, 100: 1}),
        ("two_sockets", {1: 16, 2: 8, 4: 4}),
        # A rank on 6 fast cores computes more than one on all 14 at the pace of the slow ones: 14 · 0.37 = 5.2.
        ("hybrid_laptop", {1: 6, 2: 3, 3: 2, 6: 1, 14: 1, 20: 1}),
        # Four fast cores, or eight at 0.45: 3.6.
        ("big_little", {1: 4, 2: 2, 4: 1}),
        ("container_v2", {1: 2, 2: 1, 4: 1}),
        ("container_v1", {1: 2, 2: 1}),
        ("bare_vm", {1: 2, 2: 1}),
    ],
)
def test_threads_follow_the_cores(machine: str, threads_by_ranks: dict[int, int], tmp_path: Path) -> None:
    topology = machine_topology(machine, tmp_path)
    assert {ranks: threads_for(topology, ranks) for ranks in threads_by_ranks} == threads_by_ranks


def test_all_cores_are_used_where_many_slow_ones_compute_more_than_the_fast_ones() -> None:
    """Intel Core i9-13900K: 8 fast cores and 16 at 0.4 of their speed, 24 · 0.4 = 9.6."""
    topology = machine_of([1024] * 8 + [410] * 16)
    assert threads_for(topology, 1) == 24


@pytest.mark.parametrize("machine", MACHINES)
def test_the_launcher_plans_the_threads_that_the_machine_itself_would_choose(machine: str, tmp_path: Path) -> None:
    """It has only the numbers that the agent sends."""
    topology = machine_topology(machine, tmp_path)
    for ranks in (1, 2, 3, 7):
        node = Node("a", "10.0.0.1", "eth0", ranks, topology.usable, core_speeds=topology.core_speeds)
        commands = plan_ranks(RunConfig(), lambda _: "runs/x", [node], Rendezvous("10.0.0.1", 1), resume=False)
        assert {int(command.env["OMP_NUM_THREADS"]) for command in commands} == {threads_for(topology, ranks)}


@pytest.mark.parametrize(
    ("machine", "cpus", "cores"),
    [
        ("two_sockets", (None, None), (8, 8)),
        ("two_sockets", (2.5, None), (2, 8)),
        ("two_sockets", (0.3, 99.0), (1, 16)),
        # Emulated nodes on the fast cores only.
        ("hybrid_laptop", (None, None), (3, 3)),
        ("container_v2", (None, 4.0), (1, 2)),
    ],
)
def test_emulated_nodes_divide_the_machine_and_keep_to_their_quota(
    machine: str,
    cpus: tuple[float | None, ...],
    cores: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = machine_topology(machine, tmp_path)
    monkeypatch.setattr("shoal.cluster.lab.this_topology", lambda: topology)
    link = Link()
    nodes = tuple(NodeSpec(name=f"node{i}", address=f"10.77.0.{i}", link=link, cpu=cpu) for i, cpu in enumerate(cpus))
    assert tuple(node.cores for node in as_nodes(LabSpec(nodes=nodes))) == cores


def machine_of(speeds: Sequence[int], quota: float | None = None, nodes: int = 1) -> Topology:
    """Return a machine whose cores have two hardware threads each, divided evenly into NUMA nodes."""
    count = len(speeds)
    cores = [Core((cpu, cpu + count), speed, cpu * nodes // count) for cpu, speed in enumerate(speeds)]
    return Topology(tuple(cores), None if quota is None else Quota(quota, "cpu.max"))


speeds_of_cores = st.lists(st.sampled_from([300, 700, FULL_SPEED]), min_size=1, max_size=24)


@given(speeds_of_cores, st.none() | st.floats(0.01, 40), st.integers(1, 30))
def test_ranks_fit_into_the_cores_and_the_quota(speeds: list[int], quota: float | None, ranks: int) -> None:
    topology = machine_of(speeds, quota)
    threads = threads_for(topology, ranks)
    room = len(speeds) if quota is None else min(len(speeds), quota)
    assert threads == 1 or ranks * threads <= room
    if len(set(speeds)) == 1:
        assert threads == max(1, int(room) // ranks)


@given(speeds_of_cores, st.integers(1, 8))
def test_no_other_number_of_threads_would_compute_more(speeds: list[int], ranks: int) -> None:
    def rate(threads: int) -> int:
        return threads * sorted(speeds, reverse=True)[ranks * threads - 1]

    threads = threads_for(machine_of(speeds), ranks)
    if ranks <= len(speeds):
        assert rate(threads) == max(rate(other) for other in range(1, len(speeds) // ranks + 1))


# Pins


@pytest.mark.parametrize(
    ("machine", "slot", "ranks", "threads", "expected"),
    [
        ("desktop", 0, 2, 4, (0, 1, 2, 3, 8, 9, 10, 11)),
        ("desktop", 1, 2, 4, (4, 5, 6, 7, 12, 13, 14, 15)),
        ("desktop_siblings_adjacent", 1, 4, 2, (4, 5, 6, 7)),
        # One spare core, for communication.
        ("desktop", 0, 1, 7, (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14)),
        # The only rank has all cores anyway.
        ("desktop", 0, 1, 8, None),
        # More threads than cores: the scheduler shares them better.
        ("desktop", 0, 3, 3, None),
        ("desktop", 8, 9, 1, None),
        ("hybrid_laptop", 0, 1, 6, tuple(range(12))),
        ("hybrid_laptop", 1, 2, 3, (6, 7, 8, 9, 10, 11)),
        # Two fast cores are left over: the third rank would gain nothing from them.
        ("hybrid_laptop", 0, 3, 4, tuple(range(8))),
        ("hybrid_laptop", 1, 3, 4, (12, 13, 14, 15)),
        ("hybrid_laptop", 2, 3, 4, (16, 17, 18, 19)),
        ("big_little", 0, 2, 1, (4,)),
        ("big_little", 0, 2, 4, (4, 5, 6, 7)),
        ("big_little", 1, 2, 4, (0, 1, 2, 3)),
        ("two_sockets", 0, 2, 8, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)),
        ("two_sockets", 1, 2, 8, (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)),
        # Three cores of the first socket are left, and not taken: five of the second are together.
        ("two_sockets", 1, 3, 5, (1, 3, 5, 7, 9, 17, 19, 21, 23, 25)),
        # The third rank has no choice.
        ("two_sockets", 2, 3, 5, (10, 11, 12, 13, 14, 26, 27, 28, 29, 30)),
        # Programs that are not visible here use the other cores.
        ("container_v2", 0, 2, 1, None),
        ("bare_vm", 1, 2, 1, (2, 3)),
    ],
)
def test_ranks_get_their_own_cores(
    machine: str, slot: int, ranks: int, threads: int, expected: tuple[int, ...] | None, tmp_path: Path
) -> None:
    assert cores_for_rank(machine_topology(machine, tmp_path), slot, ranks, threads) == expected


def test_nothing_is_pinned_where_the_system_lists_no_cores() -> None:
    assert cores_for_rank(Topology((Core(), Core(), Core())), 1, 2, 1) is None
    assert cores_for_rank(Topology(()), 0, 1, 1) is None


def test_a_quota_of_all_cores_is_no_limit() -> None:
    topology = replace(machine_of([FULL_SPEED] * 2), quota=Quota(2.0, "cpu.max"))
    assert (threads_for(topology, 2), cores_for_rank(topology, 1, 2, 1)) == (1, (1, 3))


@given(speeds_of_cores, st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_no_two_ranks_share_a_core_and_none_waits_for_a_slower_one_than_necessary(
    speeds: list[int], nodes: int, ranks: int, threads: int
) -> None:
    topology = machine_of(speeds, nodes=nodes)
    assigned = [cores_for_rank(topology, slot, ranks, threads) for slot in range(ranks)]
    if ranks * threads > len(speeds) or threads == len(speeds):
        assert assigned == [None] * ranks
        return
    cpus = [cpu for rank_cpus in assigned if rank_cpus for cpu in rank_cpus]
    assert len(cpus) == len(set(cpus)) == 2 * ranks * threads
    needed = sorted(speeds, reverse=True)[ranks * threads - 1]
    assert min(core.speed for core in topology.cores if core.cpus[0] in cpus) >= needed


@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_as_many_ranks_as_fit_are_within_one_numa_node(count: int, nodes: int, ranks: int, threads: int) -> None:
    topology = machine_of([FULL_SPEED] * count, nodes=nodes)
    node_of = {cpu: core.numa_node for core in topology.cores for cpu in core.cpus}
    assigned = [cores_for_rank(topology, slot, ranks, threads) for slot in range(ranks)]
    if None not in assigned:
        inside = sum(len({node_of[cpu] for cpu in cpus or ()}) == 1 for cpus in assigned)
        sizes = [sum(core.numa_node == node for core in topology.cores) for node in range(nodes)]
        assert inside >= min(ranks, sum(size // threads for size in sizes))


def test_the_usable_cores_of_this_machine_are_those_of_the_affinity_mask() -> None:
    this_topology.cache_clear()
    cpus = [cpu for core in this_topology().cores for cpu in core.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


def pin_each(world: World, wish: str, allowed: list[int]) -> tuple[tuple[int, ...] | None, list[int]]:
    os.sched_setaffinity(0, allowed)
    this_topology.cache_clear()
    pins = CorePins(choose_cores(world, wish))
    pins.set(is_pinned=True)
    return pins.cpus, sorted(os.sched_getaffinity(0))

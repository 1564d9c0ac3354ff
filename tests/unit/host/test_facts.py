"""Which cores a rank computes on: assignment on invented machines, and pinning on this one."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.node import Rendezvous, local_node
from shoal.config.schema import RunConfig
from shoal.engine.machine_trial import CorePins, choose_cores
from shoal.host.facts import Core, cores_for_rank, usable_cores
from shoal.host.proc import parse_cpu_list
from shoal.launch.plan import KEEP_MEMORY, plan_ranks, plan_script
from shoal.sync.world import World

FOUR = [Core((number,)) for number in range(4)]
# Numbered as by Intel: fast cores with two threads each, then slow ones with one.
HYBRID = [Core((0, 1), 1), Core((2, 3), 1), Core((4,), 0), Core((5,), 0), Core((6,), 0), Core((7,), 0)]
# Numbered as on many phones and boards: slow ones first.
BIG_LITTLE = [Core((0,), 400), Core((1,), 400), Core((2,), 1024), Core((3,), 1024)]


@pytest.mark.parametrize(
    ("cores", "slot", "ranks", "threads", "expected"),
    [
        (FOUR, 0, 2, 2, (0, 1)),
        (FOUR, 1, 2, 2, (2, 3)),
        (FOUR, 2, 4, 1, (2,)),
        # One spare core, for communication.
        (FOUR, 0, 1, 3, (0, 1, 2)),
        # The only rank has all cores anyway.
        (FOUR, 0, 1, 4, None),
        # More threads than cores: the scheduler shares them better.
        (FOUR, 0, 3, 2, None),
        (FOUR, 4, 5, 1, None),
        (HYBRID, 0, 2, 1, (0, 1)),
        (HYBRID, 1, 2, 1, (2, 3)),
        (HYBRID, 0, 1, 2, (0, 1, 2, 3)),
        (HYBRID, 1, 2, 2, (4, 5)),
        (BIG_LITTLE, 0, 2, 1, (2,)),
        (BIG_LITTLE, 1, 2, 2, (0, 1)),
        ([], 0, 1, 1, None),
        ([Core((3,))], 0, 1, 1, None),
    ],
)
def test_ranks_get_their_own_cores_and_fast_ones_first(
    cores: list[Core], slot: int, ranks: int, threads: int, expected: tuple[int, ...] | None
) -> None:
    assert cores_for_rank(cores, slot, ranks, threads) == expected


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_no_two_ranks_share_a_core(count: int, ranks: int, threads: int) -> None:
    cores = [Core((number, number + 100), number % 3) for number in range(count)]
    assigned = [cores_for_rank(cores, slot, ranks, threads) for slot in range(ranks)]
    if any(rank_cpus is None for rank_cpus in assigned):
        assert assigned == [None] * ranks
        return
    cpus = [cpu for rank_cpus in assigned if rank_cpus for cpu in rank_cpus]
    assert len(cpus) == len(set(cpus)) == 2 * ranks * threads


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        ("", set()),
        ("\n", set()),
        ("zero", set()),
        ("1-", {1}),
        ("3-x", set()),
    ],
)
def test_cpu_lists_of_the_kernel_are_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_the_usable_cores_are_those_of_the_affinity_mask() -> None:
    cpus = [cpu for core in usable_cores() for cpu in core.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


def test_ranks_keep_freed_memory_and_scripts_get_no_allocator_settings() -> None:
    nodes, rendezvous = [local_node(2)], Rendezvous("127.0.0.1", 1)
    for launcher in ("shoal", "torchrun", "spawn"):
        run = RunConfig(launcher=launcher)
        for command in plan_ranks(run, lambda node: "runs/x", nodes, rendezvous, resume=False):
            assert command.env["MIMALLOC_PURGE_DELAY"] == "-1"
    for command in plan_script(RunConfig(), ["script.py"], nodes, rendezvous):
        assert not command.env.keys() & KEEP_MEMORY.keys()


def pin_each(world: World, wish: str, allowed: list[int]) -> tuple[tuple[int, ...] | None, list[int]]:
    os.sched_setaffinity(0, allowed)
    pins = CorePins(choose_cores(world, wish))
    pins.set(is_pinned=True)
    return pins.cpus, sorted(os.sched_getaffinity(0))

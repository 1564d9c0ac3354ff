"""Predicted steps: known figures, collectives, the slowest rank, strategies and machines."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.load import build_config
from shoal.config.schema import TrainConfig
from shoal.config.sync_choice import BLOCK_NUMBERS, WIRE_FORMATS, WireFormat
from shoal.cost.batch_plan import BatchPlan
from shoal.cost.data_sheets import (
    LINKS,
    MACHINES,
    NCCL,
    SheetOverrides,
    SheetSpeed,
    describe_ring,
    find_link,
    find_machines,
    make_cluster_model,
    ring,
)
from shoal.cost.model_size import grad_bytes
from shoal.cost.network import LinkSpeed, NodesNetwork, RingNetwork, collective_s, payload_factor
from shoal.cost.predict import ClusterModel, expected_max, expected_slowest, predict, speeds
from shoal.cost.strategy import SyncStrategy, element_bytes
from shoal.cost.workload import bare_workload, workload_of
from shoal.tools.plan.advise import make_plan, make_row

GPT2 = workload_of(build_config("gpt2-124m"))
GIGABIT = LinkSpeed(125e6, 1e-3)


def setting(
    link: str = "1gbe", machine: str = "laptop", ranks_per_node: int = 1, efficiency: float | None = None
) -> ClusterModel:
    wired = find_link(link)
    return make_cluster_model(
        (wired,), find_machines(machine, wired), ranks_per_node, SheetOverrides(efficiency=efficiency)
    )


# Known figures


def test_the_payload_factor_tends_to_two() -> None:
    factors = [payload_factor(count) for count in (1, 2, 3, 1000)]
    assert factors == pytest.approx([0.0, 1.0, 4 / 3, 2.0], abs=0.003)


@pytest.mark.parametrize(("nodes", "seconds"), [(2, 4.5), (3, 6.0)])
def test_gpt2_communication_over_one_gigabit_matches_known_times(nodes: int, seconds: float) -> None:
    row = make_row(GPT2, SyncStrategy(), setting(efficiency=0.9), nodes)
    assert row.prediction.step.comm_s == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(("link", "seconds"), [("1gbe", 14.3), ("10gbe", 1.43), ("400gbe", 0.036)])
@pytest.mark.parametrize("machine", ["laptop", "h100"])
def test_communication_of_760_million_bf16_gradients_matches_known_times(
    link: str, machine: str, seconds: float
) -> None:
    model = bare_workload(760_000_000, 1024, TrainConfig(), "bf16")
    step = predict(model, SyncStrategy(), setting(link, machine, efficiency=0.85), 2).step
    assert step.comm_s == pytest.approx(seconds, rel=0.04)


# Collectives


def test_ring_collectives_have_their_textbook_times() -> None:
    assert collective_s("all-reduce", 4, 125e6, GIGABIT) == pytest.approx(1.5 + 6e-3)
    assert collective_s("reduce-scatter", 4, 125e6, GIGABIT) == pytest.approx(0.75 + 3e-3)
    assert collective_s("all-gather", 4, 125e6, GIGABIT) == pytest.approx(0.75 + 3e-3)


def test_tree_collectives_have_their_textbook_times() -> None:
    assert collective_s("all-reduce", 8, 125e6, GIGABIT, "tree") == pytest.approx(2.0 + 6e-3)
    assert collective_s("broadcast", 8, 125e6, GIGABIT, "tree") == pytest.approx(3.0 + 3e-3)


@given(st.sampled_from(["all-reduce", "reduce-scatter", "all-gather", "broadcast"]), st.floats(0, 1e9))
def test_collectives_of_one_rank_take_no_time(op: str, size: float) -> None:
    assert collective_s(op, 1, size, GIGABIT) == 0.0  # type: ignore[arg-type]


@given(st.integers(2, 10_000), st.floats(1, 1e9))
def test_reduce_scatter_and_all_gather_add_up_to_all_reduce(world: int, size: float) -> None:
    halves = [collective_s(op, world, size, GIGABIT) for op in ("reduce-scatter", "all-gather")]
    assert sum(halves) == pytest.approx(collective_s("all-reduce", world, size, GIGABIT))


def test_trees_are_used_for_large_worlds_where_allowed() -> None:
    plain, with_trees = RingNetwork(1e9, 1e-4), RingNetwork(1e9, 1e-4, trees=True)
    assert with_trees.all_reduce(2, 1e8, 4) == plain.all_reduce(2, 1e8, 4)
    assert with_trees.all_reduce(1000, 1e6, 4).seconds < 0.1 * plain.all_reduce(1000, 1e6, 4).seconds


def test_a_hierarchical_all_reduce_reduces_inside_nodes_first() -> None:
    network = NodesNetwork(8, RingNetwork(1e9, 1e-5), RingNetwork(1e8, 1e-3), hierarchical=True)
    assert network.all_reduce(32, 1e8, 4).seconds == pytest.approx(1.75 * 0.1 + 14e-5 + 1.5 + 6e-3)


def test_a_flat_ring_has_a_round_for_every_rank() -> None:
    flat = NodesNetwork(8, RingNetwork(1e9, 1e-5), RingNetwork(1e8, 1e-3))
    assert flat.all_reduce(32, 1e8, 4).seconds == pytest.approx(2 * 31 / 32 + 62e-3)
    assert flat.all_reduce(8, 1e8, 4).seconds == pytest.approx(0.175 + 14e-5), "one node uses only its inner network"


def test_wireless_ranks_share_the_air_time() -> None:
    """Two stations and an access point: each byte is on the air twice, in both directions at once."""
    cable, air = RingNetwork(1e8, 0.0), RingNetwork(1e8, 0.0, is_shared_medium=True)
    assert air.all_reduce(2, 1e8, 4).seconds == pytest.approx(4 * cable.all_reduce(2, 1e8, 4).seconds)
    assert air.all_reduce(3, 1e8, 4).seconds == pytest.approx(6 * cable.all_reduce(3, 1e8, 4).seconds)


def test_two_gpus_share_one_of_the_links_that_eight_have() -> None:
    one, seven = RingNetwork(48e9, 0.0), ring((LINKS["xgmi"],), NCCL, SheetOverrides(latency="0ms"))
    for ranks, links in ((2, 1), (3, 2), (8, 7), (16, 7)):
        assert seven.wire(ranks).bytes_per_s == pytest.approx(links * one.bytes_per_s)
    assert seven.all_reduce(2, 1e9, 2).seconds == pytest.approx(one.all_reduce(2, 1e9, 2).seconds)
    assert describe_ring(seven) == "48 GB/s to each of 7 peers, 0 µs a message"
    flat = NodesNetwork(4, seven, RingNetwork(1e12, 0.0))
    assert flat.all_reduce(8, 1e9, 2).seconds == pytest.approx(1.75 * 1e9 / (3 * 48e9))


# The slowest rank


@pytest.mark.parametrize(("count", "value"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (10, 1.5388), (1000, 3.2414)])
def test_the_expected_maximum_of_normals_matches_known_values(count: int, value: float) -> None:
    assert expected_max(count) == pytest.approx(value, abs=1e-4)


def test_the_expected_slowest_of_unequal_ranks_matches_sampling() -> None:
    means, deviations = [1.0, 1.2, 0.9, 1.2], [0.1, 0.2, 0.5, 0.0]
    random = Random(1)
    drawn = [max(map(random.gauss, means, deviations)) for _ in range(40_000)]
    assert expected_slowest(means, deviations) == pytest.approx(statistics.fmean(drawn), rel=0.005)


def test_the_slowest_of_one_or_of_steady_ranks_is_exact() -> None:
    assert expected_slowest([2.0], [0.3]) == pytest.approx(2.0)
    assert expected_slowest([2.0, 3.0], [0.0, 0.0]) == 3.0


# Levers


def step_s(strategy: SyncStrategy, nodes: int = 4, cluster: ClusterModel | None = None) -> float:
    return predict(GPT2, strategy, cluster or setting(), nodes).step.step_s


def test_compression_helps_on_a_slow_link_and_costs_on_a_fast_one() -> None:
    assert step_s(SyncStrategy(wire="fp16")) < step_s(SyncStrategy())
    fast = setting("400gbe", "laptop", efficiency=1.0)
    assert step_s(SyncStrategy(wire="int8"), cluster=fast) > step_s(SyncStrategy(), cluster=fast)


def test_overlap_hides_communication() -> None:
    assert step_s(SyncStrategy()) < step_s(SyncStrategy(overlap=False))
    barrier = predict(GPT2, SyncStrategy(overlap=False), setting(), 4).step
    assert barrier.exposed_s == pytest.approx(barrier.comm_s)


def test_accumulation_pays_one_exchange_for_more_tokens() -> None:
    once, four = (predict(GPT2, SyncStrategy(accumulation=count), setting(), 4) for count in (1, 4))
    assert four.tokens == 4 * once.tokens
    assert four.step.comm_s == once.step.comm_s
    assert four.tokens_per_s > 1.4 * once.tokens_per_s


def test_outer_steps_divide_the_exchange_and_streaming_hides_it() -> None:
    ddp, local = (
        predict(GPT2, SyncStrategy(), setting(), 4),
        predict(GPT2, SyncStrategy(sync="local", every=8), setting(), 4),
    )
    streaming = predict(GPT2, SyncStrategy(sync="streaming", every=8), setting(), 4)
    assert local.step.comm_s == pytest.approx(ddp.step.comm_s / 8, rel=0.02)
    assert local.step.exposed_s == pytest.approx(local.step.comm_s)
    assert local.wire_bytes == pytest.approx(ddp.wire_bytes / 8)
    assert streaming.step.exposed_s < 0.1 * local.step.exposed_s


def test_streaming_cannot_hide_what_takes_longer_than_computing() -> None:
    slow = predict(GPT2, SyncStrategy(sync="streaming", every=2), setting("1mbit"), 2).step
    busy_s = slow.compute_s + slow.optimizer_s
    assert slow.exposed_s == pytest.approx(slow.comm_s - busy_s, rel=0.01)


@pytest.mark.parametrize(("sync", "times"), [("zero1", 1.0), ("zero2", 1.5), ("zero3", 3.0)])
def test_sharding_sends_what_its_table_says(sync: str, times: float) -> None:
    """Against an all-reduce, with two micro-batches: one, (K + 1)/2 and 3K/2."""
    ddp, sharded = (predict(GPT2, SyncStrategy(sync=name), setting(), 2) for name in ("ddp", sync))
    assert sharded.batch_plan.counts == (2, 2)
    assert sharded.step.comm_s == pytest.approx(times * ddp.step.comm_s, rel=0.01)
    assert sharded.wire_bytes == pytest.approx(times * ddp.wire_bytes)
    assert sharded.payload == times


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("sync", ["zero1", "zero2", "zero3"])
def test_the_time_of_an_exchange_is_that_of_its_bytes(sync: str, copies: int) -> None:
    network = RingNetwork(1e8, 0.0)
    cluster = ClusterModel(setting().speed, network)
    prediction = predict(GPT2.with_batch(6), SyncStrategy(sync=sync, copies=copies), cluster, 3)
    assert prediction.step.comm_s == pytest.approx(prediction.wire_bytes / 1e8)


def test_zero1_hides_its_gather_behind_forward_and_divides_the_update() -> None:
    ddp, zero1 = (predict(GPT2, SyncStrategy(sync=sync), setting(), 2).step for sync in ("ddp", "zero1"))
    assert zero1.step_s == pytest.approx(ddp.step_s, rel=0.1)
    assert zero1.exposed_s < zero1.comm_s / 2
    assert zero1.optimizer_s == pytest.approx(ddp.optimizer_s / 2)
    three, copied = (predict(GPT2, SyncStrategy(sync="zero1", copies=count), setting(), 3).step for count in (0, 1))
    assert three.optimizer_s == pytest.approx(ddp.optimizer_s / 3)
    assert copied.optimizer_s == pytest.approx(ddp.optimizer_s * 2 / 3)
    assert copied.comm_s == pytest.approx(three.comm_s)


def test_powersgd_sends_two_messages_for_each_bucket() -> None:
    latency_only = ClusterModel(setting().speed, RingNetwork(1e30, 1e-3))
    plain, low_rank = (
        predict(GPT2, SyncStrategy().with_(wire=wire), latency_only, 2).step for wire in ("fp32", "powersgd")
    )
    assert low_rank.comm_s == pytest.approx(2 * plain.comm_s)


@pytest.mark.parametrize("sync", ["ddp", "local", "diloco", "streaming", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_one_rank_exchanges_nothing(sync: str, wire: str) -> None:
    prediction = predict(GPT2, SyncStrategy().with_(sync=sync, wire=wire), setting(), 1)
    assert (prediction.step.comm_s, prediction.step.exposed_s, prediction.step.wait_s, prediction.wire_bytes) == (
        0,
        0,
        0,
        0,
    )


@given(
    st.integers(1, 64),
    st.sampled_from(["ddp", "local", "diloco", "streaming", "zero1", "zero2", "zero3"]),
    st.sampled_from(sorted(LINKS)),
    st.sampled_from(sorted(MACHINES)),
)
def test_parts_are_never_negative_and_add_up(nodes: int, sync: str, link: str, machine: str) -> None:
    workload = GPT2.with_batch(64)
    step = predict(workload, SyncStrategy().with_(sync=sync), setting(link, machine), nodes).step
    parts = (step.compute_s, step.exposed_s, step.wait_s, step.optimizer_s, step.other_s)
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(step.step_s)


def test_a_number_of_four_bits_is_half_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIRE_FORMATS, "int4", WireFormat("int4", "", "", BLOCK_NUMBERS // 2))
    assert element_bytes(SyncStrategy(wire="int4"), GPT2) == 0.5
    assert grad_bytes([(3,), (5, 2)], "int4") == 7
    exact, packed = (predict(GPT2, SyncStrategy(wire=wire), setting(), 2) for wire in ("fp32", "int4"))
    assert packed.wire_bytes == pytest.approx(exact.wire_bytes / 8)


def test_a_lever_names_all_its_parts() -> None:
    strategy = SyncStrategy("zero1", "int8", 2, hierarchical=True, balanced=True)
    assert str(strategy) == "zero1, int8, batch ×2, balanced, hierarchical"
    assert str(strategy.with_(copies=0, accumulation=1)) == "zero1, int8, no copies, balanced, hierarchical"
    assert strategy.in_world(1).sync == "ddp"
    assert strategy.in_world(2) == strategy


# Machines


def test_a_slower_machine_gets_a_smaller_share_when_balanced() -> None:
    unequal, workload = setting(machine="desktop,laptop"), GPT2.with_batch(16)
    assert speeds(workload, unequal.speed, 2) == (1.0, 0.37)
    equal, balanced = (make_row(workload, SyncStrategy(balanced=choice), unequal, 2) for choice in (False, True))
    assert balanced.prediction.batch_plan == BatchPlan(1, (12, 4))
    assert balanced.prediction.tokens_per_s > 1.5 * equal.prediction.tokens_per_s
    ideal = equal.speedup / equal.efficiency
    assert ideal == pytest.approx(1.37, abs=0.005)
    assert balanced.speedup < ideal


def test_speedup_is_relative_to_the_fastest_machine_alone() -> None:
    slow_first = make_row(GPT2, SyncStrategy(), setting(machine="laptop,desktop"), 2)
    fast_first = make_row(GPT2, SyncStrategy(), setting(machine="desktop,laptop"), 2)
    assert slow_first.speedup == pytest.approx(fast_first.speedup)
    assert slow_first.efficiency == pytest.approx(fast_first.efficiency)


def test_the_ranks_of_a_node_share_its_cpu_but_not_its_gpus() -> None:
    def alone(machine: str, ranks: int) -> float:
        speed = SheetSpeed((MACHINES[machine],), ranks)
        return speed.work(GPT2, 0, 16, 1).compute_s

    assert alone("laptop", 4) == pytest.approx(4 * alone("laptop", 1))
    assert alone("h100", 4) == alone("h100", 1)


def test_a_small_model_on_a_gpu_is_bound_by_kernel_launches() -> None:
    speed = SheetSpeed((MACHINES["h200"],))
    grammar = workload_of(build_config("grammar"))
    assert speed.work(grammar, 0, 1, 1).compute_s == pytest.approx(speed.work(grammar, 0, 16, 1).compute_s)
    assert speed.work(grammar, 0, 16, 1).compute_s == pytest.approx(4.2e-3)


def test_gloo_has_a_limit_of_its_own_unless_an_efficiency_is_stated() -> None:
    def rate(link: str, machine: str, efficiency: float | None = None) -> float:
        network = setting(link, machine, efficiency=efficiency).network
        assert isinstance(network, RingNetwork)
        return 8 * network.bytes_per_s

    assert rate("100gbe", "laptop") == pytest.approx(7e9)
    assert rate("100gbe", "h100") == pytest.approx(94e9)
    assert rate("100gbe", "laptop", 0.5) == pytest.approx(50e9)
    assert rate("100gbe", "laptop,h100") == pytest.approx(7e9), "one machine without a GPU sets the limit"


def test_a_bare_model_gets_a_micro_batch_that_fits() -> None:
    bare = bare_workload(760_000_000, 1024, TrainConfig(global_batch=512), "bf16")
    prediction = predict(bare, SyncStrategy(), setting("400gbe", "h100"), 2)
    assert prediction.fits
    assert prediction.batch_plan.micro_batch < 64
    stated = workload_of(build_config("gpt2-124m", sets=["train.global_batch=64", "train.micro_batch=64"]))
    assert not predict(stated, SyncStrategy(), setting("400gbe", "rtx4070"), 1).fits, "a stated micro-batch is kept"


def test_rows_of_a_plan_are_ordered_by_nodes() -> None:
    plan = make_plan(GPT2.with_batch(8), SyncStrategy(), setting(), [1, 2, 4, 8])
    assert [row.nodes for row in plan.rows] == [1, 2, 4, 8]
    assert plan.rows[0].speedup == pytest.approx(1.0)
    assert [row.efficiency for row in plan.rows] == sorted((row.efficiency for row in plan.rows), reverse=True)
    assert plan.best is plan.rows[-1]


def test_sixteen_thousand_ranks_can_be_predicted() -> None:
    bare = bare_workload(10**9, 1024, TrainConfig(global_batch=2**15), "bf16")
    row = make_row(bare, SyncStrategy(), setting("400gbe", "h100"), 16_384)
    assert row.prediction.batch_plan.global_batch == 2**15
    assert 0.2 < row.efficiency < 1

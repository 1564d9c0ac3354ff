"""The order of samples and its shards: each sample exactly once, for any world size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.batch_plan import BatchPlan, divide_batch
from shoal.engine.sampling import CursorShard, Draw, ModuloShard, permute, sample_indices

counts = st.integers(1, 3000)
seeds = st.integers(0, 2**63)


@given(counts, seeds, st.integers(0, 50))
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))


@given(st.integers(50, 3000), seeds)
def test_epochs_differ_and_are_shuffled(count: int, seed: int) -> None:
    first, second = (permute(np.arange(count), count, seed, epoch) for epoch in (0, 1))
    assert (first != second).any()
    assert (first != np.arange(count)).any()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permute(np.arange(10), 10, 35_000, 0).tolist() == [7, 5, 8, 1, 4, 6, 3, 2, 0, 9]


@given(counts, seeds, st.integers(0, 10_000), st.integers(1, 64))
def test_any_position_can_be_computed_alone(count: int, seed: int, first: int, length: int) -> None:
    together = sample_indices(np.arange(first, first + length), count, seed)
    alone = [int(sample_indices(np.array([position]), count, seed)[0]) for position in range(first, first + length)]
    assert together.tolist() == alone


@st.composite
def batch_plans(draw: st.DrawFn) -> BatchPlan:
    world = draw(st.integers(1, 9))
    micro = draw(st.integers(1, 5))
    return divide_batch(micro * draw(st.integers(world, 40)), micro, (1.0,) * world)


@given(batch_plans(), counts, seeds, st.integers(0, 200))
def test_the_shards_of_a_step_have_no_overlap_or_gap(plan: BatchPlan, count: int, seed: int, step: int) -> None:
    world = len(plan.shares)
    cursor = step * plan.global_batch
    parts = [CursorShard(rank, plan, count, seed).indices(cursor) for rank in range(world)]
    whole = sample_indices(np.arange(cursor, cursor + plan.global_batch), count, seed)
    assert np.concatenate(parts).tolist() == whole.tolist()


@given(batch_plans(), st.integers(9, 3000), seeds)
def test_shard_sizes_add_up(plan: BatchPlan, count: int, seed: int) -> None:
    ranks = range(len(plan.shares))
    assert sum(CursorShard(rank, plan, count, seed).size for rank in ranks) == count
    assert sum(ModuloShard(rank, plan, count, seed).size for rank in ranks) == count


@given(batch_plans(), st.integers(9, 500), seeds, st.integers(0, 100))
def test_a_modulo_shard_has_only_its_own_samples(plan: BatchPlan, count: int, seed: int, step: int) -> None:
    world = len(plan.shares)
    for rank in range(world):
        indices = ModuloShard(rank, plan, count, seed).indices(step * plan.global_batch)
        assert set(indices % world) == {rank}
        assert indices.max() < count


def test_a_modulo_shard_is_exhausted_before_it_repeats() -> None:
    shard = ModuloShard(1, divide_batch(6, 1, (1.0,) * 3), count=30, seed=1)
    seen = np.concatenate([shard.indices(step * 6) for step in range(5)])
    assert sorted(seen.tolist()) == list(range(1, 30, 3))


def test_draws_are_the_same_on_every_machine() -> None:
    assert Draw().indices(np.arange(8), 10, 35_000).tolist() == [9, 1, 0, 2, 7, 3, 3, 2]
    assert Draw(np.array([1.0, 0.0, 3.0])).indices(np.arange(8), 3, 35_000).tolist() == [2, 2, 2, 2, 0, 2, 2, 0]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=9).filter(any), seeds)
def test_samples_are_drawn_by_weight(weights: list[float], seed: int) -> None:
    drawn = Draw(np.array(weights)).indices(np.arange(4000), len(weights), seed)
    parts = np.bincount(drawn, minlength=len(weights)) / 4000
    assert np.abs(parts - np.array(weights) / sum(weights)).max() < 0.05
    assert not any(part for part, weight in zip(parts, weights, strict=True) if not weight)


@given(batch_plans(), counts, seeds, st.integers(0, 200))
def test_a_draw_belongs_to_its_position(plan: BatchPlan, count: int, seed: int, step: int) -> None:
    draw, cursor = Draw(), step * plan.global_batch
    shards = [CursorShard(rank, plan, count, seed, draw) for rank in range(len(plan.shares))]
    together = np.concatenate([shard.indices(cursor) for shard in shards])
    assert together.tolist() == draw.indices(np.arange(cursor, cursor + plan.global_batch), count, seed).tolist()

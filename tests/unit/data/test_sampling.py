"""The order of samples and its shards: each sample exactly once, for any world size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema import RunConfig, TrainConfig
from shoal.cost.batch_plan import (
    BatchPlan,
    divide_batch,
    micro_batch,
    rank_weights,
    redivide_batch,
    shares,
    world_batch,
)
from shoal.data.sampling import CursorShard, ModuloShard, make_shard, permute, sample_indices
from shoal.errors import ConfigError, UsageError

counts = st.integers(1, 3000)
seeds = st.integers(0, 2**63)


def equal(world: int) -> tuple[float, ...]:
    return (1.0,) * world


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
    return divide_batch(micro * draw(st.integers(world, 40)), micro, equal(world))


@given(batch_plans(), counts, seeds, st.integers(0, 200))
def test_the_shards_of_a_step_have_no_overlap_or_gap(plan: BatchPlan, count: int, seed: int, step: int) -> None:
    world = len(plan.micro_batches)
    cursor = step * plan.global_batch
    parts = [CursorShard(rank, plan, count, seed).indices(cursor) for rank in range(world)]
    whole = sample_indices(np.arange(cursor, cursor + plan.global_batch), count, seed)
    assert np.concatenate(parts).tolist() == whole.tolist()


@given(batch_plans(), st.integers(9, 3000), seeds)
def test_shard_sizes_add_up(plan: BatchPlan, count: int, seed: int) -> None:
    ranks = range(len(plan.micro_batches))
    assert sum(CursorShard(rank, plan, count, seed).size for rank in ranks) == count
    assert sum(ModuloShard(rank, plan, count, seed).size for rank in ranks) == count


@given(batch_plans(), st.integers(9, 500), seeds, st.integers(0, 100))
def test_a_modulo_shard_has_only_its_own_samples(plan: BatchPlan, count: int, seed: int, step: int) -> None:
    world = len(plan.micro_batches)
    for rank in range(world):
        indices = ModuloShard(rank, plan, count, seed).indices(step * plan.global_batch)
        assert set(indices % world) == {rank}
        assert indices.max() < count


def test_a_modulo_shard_is_exhausted_before_it_repeats() -> None:
    shard = ModuloShard(1, divide_batch(6, 1, equal(3)), count=30, seed=1)
    seen = np.concatenate([shard.indices(step * 6) for step in range(5)])
    assert sorted(seen.tolist()) == list(range(1, 30, 3))


@given(st.lists(st.integers(), max_size=100), st.integers(1, 12))
def test_make_shard_covers_everything_once(items: list[int], world: int) -> None:
    shards = [make_shard(rank, world, items) for rank in range(world)]
    assert sorted(item for shard in shards for item in shard) == sorted(items)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(shards[index % world][index // world] == item for index, item in enumerate(items))


def test_make_shard_without_items_uses_the_grammar_corpus() -> None:
    shards = [make_shard(rank, 3) for rank in range(3)]
    assert sum(map(len, shards)) == len(make_shard(0, 1))
    assert shards[0][0].endswith((".", "?"))
    assert not set(shards[0]) & set(shards[1])


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_make_shard_refuses_a_rank_that_does_not_exist(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        make_shard(rank, world, [1, 2, 3])


@given(st.integers(1, 200), st.integers(1, 9))
def test_the_chosen_micro_batch_always_fits(batch: int, world: int) -> None:
    train = TrainConfig(global_batch=max(batch, world))
    size = micro_batch(train, equal(world))
    assert train.global_batch % size == 0
    assert min(divide_batch(train.global_batch, size, equal(world)).micro_batches) >= 1


@pytest.mark.parametrize(("world", "expected"), [(1, 24), (2, 12), (3, 8), (4, 6), (5, 3)])
def test_a_micro_batch_with_equal_work_is_preferred(world: int, expected: int) -> None:
    assert micro_batch(TrainConfig(global_batch=24), equal(world)) == expected


@pytest.mark.parametrize(
    ("world", "is_compiled", "expected"),
    [
        (3, False, BatchPlan(4, (1, 1, 1))),
        (2, False, BatchPlan(3, (2, 2))),
        (2, True, BatchPlan(4, (2, 1))),
        (4, True, BatchPlan(3, (1, 1, 1, 1))),
        (1, False, BatchPlan(4, (3,))),
        (12, False, BatchPlan(1, (1,) * 12)),
    ],
)
def test_a_batch_of_twelve_is_divided_again(world: int, is_compiled: bool, expected: BatchPlan) -> None:
    """Divide evenly into micro-batches that fitted before; keep the shape where another must be compiled."""
    assert redivide_batch(12, 4, equal(world), is_compiled) == expected


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="13 ranks cannot share"):
        redivide_batch(12, 4, equal(13))


def test_weak_scaling_gives_every_rank_the_stated_batch() -> None:
    train = TrainConfig(global_batch=12, scaling="weak")
    assert world_batch(train, 4) == 48
    assert divide_batch(48, micro_batch(train, equal(4)), equal(4)).share(3) == 12


def test_more_ranks_than_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 ranks cannot share a global batch of 4") as caught:
        micro_batch(TrainConfig(global_batch=4), equal(5))
    assert "train.global_batch=5" in caught.value.fix


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="micro-batches of 7") as caught:
        micro_batch(TrainConfig(global_batch=24, micro_batch=7), equal(2))
    assert "train.micro_batch=6" in caught.value.fix


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 500))
def test_shares_by_weight_are_whole_and_complete(weights: list[float], extra: int) -> None:
    """Moving one micro-batch from the slowest rank to another never shortens the step."""
    count = len(weights) + extra
    counts_by_rank = shares(count, weights)
    assert sum(counts_by_rank) == count
    assert min(counts_by_rank) >= 1
    last = max(range(len(weights)), key=lambda rank: counts_by_rank[rank] / weights[rank])
    others = [(counts_by_rank[rank] + 1) / weight for rank, weight in enumerate(weights) if rank != last]
    assert counts_by_rank[last] == 1 or all(
        counts_by_rank[last] / weights[last] <= other * (1 + 1e-9) for other in others
    )


def test_weights_have_one_number_for_each_rank() -> None:
    assert rank_weights(RunConfig(weights="2/1"), 2) == (2.0, 1.0)
    assert divide_batch(24, 4, (2, 1)).micro_batches == (4, 2)
    for wrong in ("1", "1/1/1", "0/1"):
        with pytest.raises(ConfigError, match="does not fit 2 ranks"):
            rank_weights(RunConfig(weights=wrong), 2)

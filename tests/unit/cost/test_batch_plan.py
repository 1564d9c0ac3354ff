"""How a global batch is divided over the ranks: whole micro-batches, by weight, and again in another world."""

from __future__ import annotations

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
from shoal.errors import ConfigError


def equal(world: int) -> tuple[float, ...]:
    return (1.0,) * world


@given(st.integers(1, 200), st.integers(1, 9))
def test_the_chosen_micro_batch_always_fits(batch: int, world: int) -> None:
    train = TrainConfig(global_batch=max(batch, world))
    size = micro_batch(train, equal(world))
    assert train.global_batch % size == 0
    assert min(divide_batch(train.global_batch, size, equal(world)).shares) >= 1


@pytest.mark.parametrize(("world", "expected"), [(1, 24), (2, 12), (3, 8), (4, 6), (5, 3)])
def test_a_micro_batch_with_equal_work_is_preferred(world: int, expected: int) -> None:
    assert micro_batch(TrainConfig(global_batch=24), equal(world)) == expected


@pytest.mark.parametrize(
    ("world", "is_compiled", "expected"),
    [
        (3, False, BatchPlan(4, (4, 4, 4))),
        (2, False, BatchPlan(4, (6, 6))),
        (5, False, BatchPlan(4, (3, 3, 2, 2, 2))),
        (2, True, BatchPlan(4, (8, 4))),
        (4, True, BatchPlan(3, (3, 3, 3, 3))),
        (1, False, BatchPlan(4, (12,))),
        (12, False, BatchPlan(4, (1,) * 12)),
    ],
)
def test_a_batch_of_twelve_is_divided_again(world: int, is_compiled: bool, expected: BatchPlan) -> None:
    """Divide evenly into micro-batches that fitted before; keep the shape where another must be compiled."""
    assert redivide_batch(12, 4, equal(world), is_compiled) == expected


@given(st.integers(1, 300), st.integers(1, 64))
def test_a_share_is_computed_in_few_micro_batches_of_about_equal_size(share: int, most: int) -> None:
    plan = BatchPlan(most, (share, 7))
    sizes = plan.sizes(0)
    assert sum(sizes) == share
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == plan.counts[0] == -(-share // most)


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="13 ranks cannot share"):
        redivide_batch(12, 4, equal(13))


def test_weak_scaling_gives_every_rank_the_stated_batch() -> None:
    train = TrainConfig(global_batch=12, scaling="weak")
    assert world_batch(train, 4) == 48
    assert divide_batch(48, micro_batch(train, equal(4)), equal(4)).shares[3] == 12


def test_more_ranks_than_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 ranks cannot share a global batch of 4") as caught:
        micro_batch(TrainConfig(global_batch=4), equal(5))
    assert "train.global_batch=5" in caught.value.fix
    with pytest.raises(ConfigError, match=r"2 ranks cannot share a global batch of 1 sequence$"):
        micro_batch(TrainConfig(global_batch=1), equal(2))


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
    assert divide_batch(24, 4, (2, 1)).shares == (16, 8)
    for wrong in ("1", "1/1/1", "0/1"):
        with pytest.raises(ConfigError, match="does not fit 2 ranks"):
            rank_weights(RunConfig(weights=wrong), 2)

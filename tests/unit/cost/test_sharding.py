"""Parts of a sharded training: how large each rank's is, and what is sent for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.sharding import copies_in, held_fractions, part_shares, payload


def test_two_ranks_keep_no_copies_unless_they_are_asked_to() -> None:
    assert [copies_in(ranks, None) for ranks in (1, 2, 3, 5)] == [0, 0, 1, 1]
    assert [copies_in(ranks, 1) for ranks in (1, 2, 3)] == [0, 1, 1]
    assert copies_in(5, 0) == 0


@pytest.mark.parametrize(
    ("level", "ranks", "micro_batches", "copies", "sent"),
    [
        (1, 2, 4, 0, 1.0),
        (1, 3, 4, 0, 4 / 3),
        (1, 3, 4, 1, 4 / 3),
        (2, 2, 1, 0, 1.0),
        (2, 2, 4, 0, 2.5),
        (2, 3, 4, 1, 10 / 3),
        (3, 2, 1, 0, 1.5),
        (3, 2, 4, 0, 6.0),
        (3, 3, 2, 1, 3.0),
    ],
)
def test_bytes_of_a_step(level: int, ranks: int, micro_batches: int, copies: int, sent: float) -> None:
    assert payload(level, ranks, micro_batches, copies) == pytest.approx(sent)


def test_parts_are_equal_while_there_is_room() -> None:
    assert part_shares([100.0, 25.0], 10.0, 20.0) == (0.5, 0.5)
    assert part_shares([25.0, 25.0, 25.0], 10.0, 40.0) == (1 / 3, 1 / 3, 1 / 3)


def test_parts_follow_the_room_where_it_is_short() -> None:
    assert part_shares([40.0, 20.0], 10.0, 30.0) == (0.75, 0.25)
    assert part_shares([20.0, 5.0], 10.0, 6.0) == (63 / 64, 1 / 64)
    assert part_shares([13.0, 12.0, 15.0], 10.0, 9.0) == (19 / 64, 13 / 64, 32 / 64)


@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=16),
    st.floats(0, 1e11),
    st.floats(0, 1e12),
)
def test_parts_add_up_and_every_rank_has_one(free: list[float], fixed: float, part: float) -> None:
    shares = part_shares(free, fixed, part)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= min(1 / 64, 1 / len(free))
    for share, room in zip(shares, free, strict=True):
        for other_share, other in zip(shares, free, strict=True):
            assert share >= other_share - 1 / 64 or room <= other
    if len(set(shares)) > 1:
        assert all((64 * share).is_integer() for share in shares)


@given(st.lists(st.integers(1, 63), min_size=2, max_size=5), st.integers(0, 1))
def test_all_parts_are_held_as_often_as_wanted(counts: list[int], copies: int) -> None:
    shares = [count / sum(counts) for count in counts]
    assert sum(held_fractions(shares, copies)) == pytest.approx(1 + copies)

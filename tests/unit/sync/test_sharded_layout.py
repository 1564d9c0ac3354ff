"""Parts of a model: every element has one owner, shares are as wanted, and moves give each rank what it is to keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.sync_choice import BLOCK_NUMBERS
from shoal.sync.sharded.layout import (
    BucketLayout,
    ShardLayout,
    choose_copy_shift,
    fill_buckets,
    lay_out_parts,
    plan_moves,
)

MOST_RANKS = 5
SIZES = st.lists(st.integers(0, 5000) | st.sampled_from([1, 255, 256, 257]), min_size=1, max_size=20)
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=MOST_RANKS).map(
    lambda weights: [weight / sum(weights) for weight in weights]
)


def lay_out(sizes: Sequence[int], shares: Sequence[float], bucket_elements: float, shift: int = 0) -> ShardLayout:
    return lay_out_parts(sizes, fill_buckets(sizes, [0] * len(sizes), bucket_elements), shares, shift)


@given(SIZES, st.lists(st.sampled_from(["float", "half"]), min_size=20, max_size=20), st.integers(1, 9000))
def test_buckets_have_all_parameters_in_order_and_one_kind_each(sizes: list[int], kinds: list[str], most: int) -> None:
    buckets = fill_buckets(sizes, kinds, most)
    assert [number for bucket in buckets for number in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len({kinds[number] for number in bucket}) == 1
        assert sum(sizes[number] for number in bucket[:-1]) < most or len(bucket) == 1


@given(SIZES, SHARES, st.integers(1, 9000))
def test_cuts_cover_each_bucket_in_whole_blocks(sizes: list[int], shares: list[float], most: int) -> None:
    for bucket in lay_out(sizes, shares, most).buckets:
        assert (bucket.cuts[0], bucket.cuts[-1], len(bucket.cuts)) == (0, bucket.elements, len(shares) + 1)
        for low, high in pairwise(bucket.cuts):
            assert low <= high
            assert high % BLOCK_NUMBERS == 0 or high == bucket.elements


@given(SIZES, SHARES, st.integers(1, 9000))
def test_a_part_is_its_share_but_for_a_block(sizes: list[int], shares: list[float], most: int) -> None:
    for bucket in lay_out(sizes, shares, most).buckets:
        for owner, share in enumerate(shares):
            begin, end = bucket.part(owner)
            assert abs(end - begin - share * bucket.elements) <= 2 * BLOCK_NUMBERS


@given(
    st.integers(1, MOST_RANKS),
    st.integers(1, BLOCK_NUMBERS - 1) | st.integers(1, 9).map(BLOCK_NUMBERS.__mul__),
    st.integers(1, 12),
)
def test_many_small_buckets_are_fair_to_equal_ranks(ranks: int, size: int, rounds: int) -> None:
    """What one bucket leaves over goes to another rank in each: after as many buckets as ranks all have as much."""
    layout = lay_out([size] * ranks * rounds, [1 / ranks] * ranks, 1)
    owned = Counter(dict.fromkeys(range(ranks), 0))
    for bucket in layout.buckets:
        for owner in range(ranks):
            begin, end = bucket.part(owner)
            owned[owner] += end - begin
    assert set(owned.values()) == {rounds * size}


@given(SIZES, SHARES, st.integers(1, 9000))
def test_the_pieces_of_all_parts_cover_every_parameter_once(sizes: list[int], shares: list[float], most: int) -> None:
    covered = [[0] * size for size in sizes]
    for bucket in lay_out(sizes, shares, most).buckets:
        for owner in range(len(shares)):
            begin, end = bucket.part(owner)
            place = begin
            for piece in bucket.pieces(begin, end):
                assert piece.offset == place
                assert piece.count > 0
                place += piece.count
                for element in range(*piece.of_parameter.indices(sizes[piece.parameter])):
                    covered[piece.parameter][element] += 1
            assert place == end
    assert all(count == 1 for counts in covered for count in counts)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=MOST_RANKS))
def test_copies_are_on_another_node_wherever_a_shift_allows_it(nodes: list[str]) -> None:
    shift, ranks = choose_copy_shift(nodes), len(nodes)

    def on_same_node(shift: int) -> int:
        return sum(nodes[rank] == nodes[(rank + shift) % ranks] for rank in range(ranks))

    assert (shift == 0) == (ranks == 1)
    assert all(on_same_node(shift) <= on_same_node(other) for other in range(1, ranks))


@pytest.mark.parametrize(
    ("nodes", "shift"), [(("a", "b"), 1), (("a", "a", "b", "b"), 2), (("a", "b", "a", "b"), 1), (("a", "b", "c"), 1)]
)
def test_nodes_with_as_many_ranks_lose_no_part(nodes: tuple[str, ...], shift: int) -> None:
    assert choose_copy_shift(nodes) == shift
    layout = ShardLayout((), len(nodes), shift)
    for owner in range(len(nodes)):
        assert len({nodes[holder] for holder in layout.holders(owner)}) == 2


@given(st.integers(1, MOST_RANKS), st.integers(0, MOST_RANKS - 1))
def test_holders_and_held_parts_are_the_same_relation(ranks: int, shift: int) -> None:
    layout = ShardLayout((), ranks, shift % ranks)
    for rank, owner in product(range(ranks), repeat=2):
        assert (owner in layout.held_by(rank)) == (rank in layout.holders(owner))


@given(
    sizes=SIZES,
    old_shares=SHARES,
    new_shares=SHARES,
    shifts=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    places=st.permutations(range(MOST_RANKS)),
)
def test_moves_give_every_rank_exactly_its_parts_from_ranks_that_hold_them(
    sizes: list[int],
    old_shares: list[float],
    new_shares: list[float],
    shifts: tuple[int, int],
    places: Sequence[int],
) -> None:
    """`places` has the new rank of every old one; those of the new world's size or more are lost."""
    old = lay_out(sizes, old_shares, 1000, shifts[0] % len(old_shares))
    new = lay_out(sizes, new_shares, 1000, shifts[1] % len(new_shares))
    holders = [[places[rank] for rank in old.holders(owner) if places[rank] < new.ranks] for owner in range(old.ranks)]
    if not all(holders):
        return  # A part was lost with all ranks that kept it.
    for before, after in zip(old.buckets, new.buckets, strict=True):
        kept = [new.held_by(rank) for rank in range(new.ranks)]
        moves = plan_moves(before, holders, after, kept)
        for target in range(new.ranks):
            arrived = sorted((move.begin, move.end) for move in moves if move.target == target)
            wanted = sorted(after.part(owner) for owner in kept[target])
            assert join(arrived) == join([part for part in wanted if part[0] < part[1]])
        for move in moves:
            assert move.begin < move.end
            parts = [owner for owner in range(old.ranks) if before.cuts[owner] < move.end <= before.cuts[owner + 1]]
            assert all(before.cuts[owner] <= move.begin for owner in parts)
            assert all(move.source in holders[owner] for owner in parts)
            assert move.source == move.target or all(move.target not in holders[owner] for owner in parts)


def join(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours; two that overlap are an error."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        assert not joined or joined[-1][1] <= begin
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def test_the_largest_part_that_is_kept() -> None:
    bucket = BucketLayout((0,), (1024,), (0, 512, 768, 1024))
    assert ShardLayout((bucket,), 3).largest_held == 0.5
    assert ShardLayout((bucket,), 3, copy_shift=1).largest_held == 0.75

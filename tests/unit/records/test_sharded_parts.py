"""What the ranks recorded of the parts of a divided model, and what is wrong with them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.part_copies import part_ranges
from shoal.records.sharded_parts import check_parts
from shoal.sync.sharded.layout import ShardLayout, lay_out_parts

SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=8)


def digests_of(layout: ShardLayout) -> dict[int, dict[str, Any]]:
    """Return the events of ranks that keep the parts of a layout."""
    return {
        rank: {
            "elements": sum(bucket.elements for bucket in layout.buckets),
            "copies": int(layout.copy_shift > 0),
            "parts": [
                {"owner": owner, "ranges": part_ranges(layout, owner), "sha256": f"of {owner}"}
                for owner in layout.held_by(rank)
            ],
        }
        for rank in range(layout.ranks)
    }


EVENTS = digests_of(lay_out_parts([1000, 2000, 300], [[0, 1], [2]], [1 / 3] * 3, copy_shift=1))


@given(sizes=SIZES, ranks=st.integers(1, 5), shift=st.integers(0, 4), split=st.integers(0, 8))
def test_every_layout_has_one_owner_for_every_element(sizes: list[int], ranks: int, shift: int, split: int) -> None:
    numbers = list(range(len(sizes)))
    buckets = [bucket for bucket in (numbers[:split], numbers[split:]) if bucket]
    layout = lay_out_parts(sizes, buckets, [1 / ranks] * ranks, shift % ranks)
    report, wrong = check_parts(digests_of(layout))
    assert report is not None
    assert not wrong
    assert (report.parts, report.elements, report.owned_once) == (ranks, sum(sizes), True)
    assert sum(report.elements_by_owner.values()) == sum(sizes)
    assert report.copies_equal is (True if shift % ranks else None)


def test_a_model_that_was_not_divided_has_no_parts() -> None:
    assert check_parts({0: {"sha256": "a"}, 1: {"sha256": "a"}}) == (None, [])


def change(rank: int, part: int, **fields: Any) -> dict[int, dict[str, Any]]:
    events = deepcopy(EVENTS)
    events[rank]["parts"][part] |= fields
    return events


@pytest.mark.parametrize(
    ("events", "rank", "text"),
    [
        (change(2, 1, sha256="other"), 2, "the copy of the part of rank 1 on rank 2 is not what rank 1 has"),
        (change(1, 0, ranges=[]), 0, "of the model belong to no rank"),
        (change(1, 0, ranges=[(0, 2100)]), 0, "of the model belong to two ranks"),
        ({**EVENTS, 1: {"sha256": "a"}}, 1, "rank 1 has recorded no parts, and rank 0 has"),
        ({**EVENTS, 1: {"parts": "torn"}}, 1, "the parts of rank 1 are not of the model that rank 0 has recorded"),
        ({**EVENTS, 1: {**EVENTS[1], "parts": EVENTS[1]["parts"][:1]}}, 0, "the part of rank 0 has 0 copies, and 1"),
    ],
)
def test_what_is_wrong_is_named(events: dict[int, dict[str, Any]], rank: int, text: str) -> None:
    report, wrong = check_parts(events)
    assert report is not None
    assert any(at == rank and text in seen for at, seen in wrong), wrong
    assert not (report.owned_once and report.copies_equal) or "recorded" in text or "copies" in text


def test_parts_of_ranks_on_other_machines_are_not_missed() -> None:
    report, wrong = check_parts({rank: EVENTS[rank] for rank in (0, 1)}, away=(2,))
    assert report is not None
    assert not wrong
    assert (report.parts, report.owned_once, report.copies_equal) == (3, None, True)

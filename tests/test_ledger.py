"""The ledger of a run whose machines came, went and lost each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.report.ledger import check_ledger
from shoal.report.membership import last_members
from shoal.report.ranklog import collect
from shoal.units import format_spans, spans_of, subtract_spans
from tests.run_samples import start

BATCH = 24
Record = dict[str, Any]


def commits(first: int, last: int, generation: str = "1-0", lineage: str = "1-0") -> list[Record]:
    return [
        {
            "step": step,
            "samples": [BATCH * (step - 1), BATCH * step],
            "members": [0, 1],
            "generation": generation,
            "lineage": lineage,
            "loss": 1.0,
        }
        for step in range(first, last + 1)
    ]


def abandoned(lineage: str, standing: str, after: int) -> Record:
    return {"abandoned": lineage, "standing": standing, "after": after, "time": 1.0}


def interleave(*sides: list[Record]) -> list[Record]:
    longest = max(map(len, sides))
    return [side[place] for place in range(longest) for side in sides if place < len(side)]


def test_generations_of_one_lineage_follow_each_other() -> None:
    report = check_ledger([*commits(1, 10), *commits(11, 13, "2-1"), *commits(14, 30, "4-0")])
    assert report.ok
    assert (report.steps, report.generations, report.lineages, report.redone) == (30, 3, 1, 0)


def test_what_two_keepers_of_a_folder_wrote_counts_once() -> None:
    one, two = commits(1, 10), commits(11, 20, "2-0")
    report = check_ledger([*interleave(one, one), *interleave(two, two[:4]), *one[3:]])
    assert report.ok
    assert (report.steps, report.samples, report.redone) == (20, 20 * BATCH, 0)


@given(st.data())
def test_copies_change_nothing_wherever_they_stand(data: st.DataObject) -> None:
    lines = [*commits(1, 8), *commits(9, 12, "3-1"), *commits(11, 20, "5-0", "5-0")]
    expected = check_ledger(lines)
    for copied in data.draw(st.lists(st.sampled_from(lines[:12]), max_size=10)):
        lines.insert(data.draw(st.integers(lines.index(copied) + 1, len(lines))), dict(copied))
    assert check_ledger(lines) == expected
    assert (expected.ok, expected.steps, expected.redone) == (True, 20, 2)


def test_a_late_line_of_an_earlier_generation_is_in_its_place() -> None:
    report = check_ledger([*commits(1, 9), *commits(11, 12, "2-1"), *commits(10, 10), *commits(13, 15, "2-1")])
    assert report.ok
    assert (report.steps, report.redone) == (15, 0)


def test_a_step_of_a_later_generation_is_a_redo_from_the_same_position_only() -> None:
    again = check_ledger([*commits(1, 10), *commits(9, 12, "2-0")])
    assert (again.ok, again.redone, again.steps) == (True, 2, 12)
    moved = commits(9, 12, "2-0")
    moved[0]["samples"] = [9 * BATCH, 10 * BATCH]
    assert check_ledger([*commits(1, 10), *moved]).doubles == [9]


def test_a_lineage_that_was_given_up_does_not_count() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(11, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-1", "3-0", 10), *commits(31, 40, "5-0", "3-0")])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone, report.lineages) == (40, 5, 0, 3)


def test_the_first_lineage_may_be_the_one_given_up() -> None:
    """The other one was built on step 11, which was in the air when they parted: that one stays."""
    sides = interleave(commits(12, 15), commits(12, 30, "3-2", "3-2"))
    report = check_ledger([*commits(1, 11), *sides, abandoned("1-0", "3-2", 10)])
    assert report.ok
    assert (report.steps, report.abandoned) == (30, 4)


def test_a_step_in_the_air_that_only_one_side_kept() -> None:
    """Step 11 was committed by those who had it, and done again by those who had not and gave up later."""
    sides = interleave(commits(11, 14, "5-0", "5-0"), commits(12, 20, "6-1", "6-1"))
    report = check_ledger([*commits(1, 11), *sides, abandoned("5-0", "6-1", 10)])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone) == (20, 4, 0)


def test_the_own_folder_of_a_machine_that_came_back() -> None:
    """Its own lineage first, then what it copied of the other one's ledger."""
    lines = [*commits(1, 10), *commits(11, 15, "3-1", "3-1"), abandoned("3-1", "3-0", 10)]
    report = check_ledger([*lines, *commits(11, 30, "3-0", "3-0")])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone) == (30, 5, 0)


def test_two_lineages_that_both_stand_are_a_fork() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(11, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides])
    assert not report.ok
    (fork,) = report.forked
    assert (set(fork.lineages), fork.first, fork.last) == ({"3-0", "3-1"}, 11, 15)
    assert (report.steps, report.gaps, report.overlaps, report.redone) == (30, [], [], 0), "the longer one is judged"


def test_a_lineage_that_left_the_one_that_goes_on_is_a_fork_too() -> None:
    report = check_ledger([*commits(1, 11), *commits(12, 13, "3-2", "3-2"), *commits(12, 40)])
    assert [(fork.first, fork.last) for fork in report.forked] == [(12, 13)]
    assert report.steps == 40


def test_giving_up_one_of_three_leaves_a_fork() -> None:
    sides = interleave(*(commits(11, 20, name, name) for name in ("3-0", "3-1", "3-2")))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-2", "3-0", 10)])
    assert [set(fork.lineages) for fork in report.forked] == [{"3-0", "3-1"}]
    assert report.abandoned == 10


@pytest.mark.parametrize(("back_to", "redone"), [(21, 0), (15, 6), (1, 20)])
def test_a_resumed_launch_is_no_fork(back_to: int, redone: int) -> None:
    report = check_ledger([*commits(1, 12), *commits(13, 20, "3-1"), *commits(back_to, 30, "4-0", "4-0")])
    assert report.ok
    assert (report.steps, report.redone, report.lineages) == (30, redone, 2)


def test_launches_with_and_without_membership_may_take_turns() -> None:
    plain = [{**record, "generation": 0} for record in commits(1, 10)]
    for record in plain:
        del record["lineage"]
    later = commits(18, 40, "0-0", "0-0")
    report = check_ledger([*plain, *commits(9, 20, "1-0", "1-0"), *later, *later[-5:]])
    assert report.ok
    assert (report.steps, report.redone) == (40, 2 + 3 + 5)


def test_gaps_are_judged_over_what_stands() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(12, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-1", "3-0", 10)])
    assert report.gaps == [(10 * BATCH, 11 * BATCH)], "two that began under one number were not built on each other"


@pytest.mark.parametrize(
    "line",
    [
        {"abandoned": "x", "standing": "1-0", "after": 3},
        {"abandoned": "1-0", "standing": "2-0"},
        {**commits(4, 4)[0], "generation": "seven"},
        {**commits(4, 4)[0], "lineage": [1, 0]},
    ],
)
def test_what_cannot_be_read_is_counted(line: Record) -> None:
    assert check_ledger([*commits(1, 3), line]).unreadable == 1


HUGE = 2**62


def test_a_huge_number_in_a_damaged_line_costs_no_memory() -> None:
    """One flipped digit must not make `shoal verify` list 2^62 steps or ranks."""
    damaged = {**commits(4, 4)[0], "step": HUGE}
    report = check_ledger([*commits(1, 3), damaged, *commits(5, 6)])
    assert not report.ok
    assert report.missing[-1][1] < HUGE
    hole = check_ledger([*commits(1, 3), {"hole": [5, HUGE]}, *commits(6, 7)])
    assert (hole.missing, hole.holes) == ([(4, 4)], [(5, 5), (8, HUGE)])
    assert len(last_members(collect([start(0, world_size=HUGE)]))) <= 1


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(spans, spans)
def test_spans_are_sets_of_numbers(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    numbers = {number for first, last in some for number in range(first, last + 1)}
    taken = {number for first, last in others for number in range(first, last + 1)}
    assert subtract_spans(some, others) == spans_of(numbers - taken)
    assert {number for first, last in spans_of(numbers) for number in range(first, last + 1)} == numbers


def test_spans_are_written_as_people_do() -> None:
    assert format_spans(spans_of([9, 3, 7, 8])) == "3, 7 to 9"
    assert format_spans(spans_of(range(0, 20, 2))) == "0, 2, 4, 6, …"

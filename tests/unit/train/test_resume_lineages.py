"""Which checkpoint a run goes on from, when its machines have several."""

from __future__ import annotations

import pytest

from shoal.errors import CheckpointError
from shoal.train.checkpoint import Progress
from shoal.train.resume import LocalCheckpoint, choose_checkpoint, have_diverged, shared_step


def past(step: int, lineage: str, *history: tuple[str, int]) -> Progress:
    return Progress(step, 10 * step, "9-9", lineage, history)


COMMON = past(40, "1-0")
LEFT = past(90, "5-0", ("1-0", 60))
RIGHT = past(80, "5-1", ("1-0", 60))


def test_a_machine_that_left_early_is_behind_and_has_not_parted() -> None:
    assert shared_step(COMMON, LEFT) == 40
    assert not have_diverged(COMMON, LEFT)
    assert choose_checkpoint({0: LocalCheckpoint("a", COMMON), 1: LocalCheckpoint("b", LEFT)}) == 1


def test_two_that_trained_on_have_parted_where_the_first_left() -> None:
    assert shared_step(LEFT, RIGHT) == 60
    assert have_diverged(LEFT, RIGHT)


def test_one_that_never_left_the_old_lineage_has_parted_too() -> None:
    assert have_diverged(past(70, "1-0"), LEFT)


def test_two_trainings_are_not_chosen_from_silently() -> None:
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint({0: LocalCheckpoint("desk", LEFT), 2: LocalCheckpoint("lap", RIGHT)})
    assert "desk has step 90 of lineage 5-0 and lap has step 80 of lineage 5-1" in refused.value.seen
    assert "they share 60 steps" in refused.value.seen
    assert "--lineage 5-0" in refused.value.fix


def test_the_user_may_choose_the_shorter_one() -> None:
    assert choose_checkpoint({0: LocalCheckpoint("desk", LEFT), 2: LocalCheckpoint("lap", RIGHT)}, "5-1") == 2


def test_an_unknown_lineage_is_named_with_those_there_are() -> None:
    with pytest.raises(CheckpointError, match="lineage 7-7") as refused:
        choose_checkpoint({0: LocalCheckpoint("desk", LEFT), 2: LocalCheckpoint("lap", RIGHT)}, "7-7")
    assert "5-0, 5-1" in refused.value.why


def test_among_equals_the_lowest_rank_has_it() -> None:
    assert choose_checkpoint({3: LocalCheckpoint("a", COMMON), 1: LocalCheckpoint("b", COMMON)}) == 1


def test_without_any_there_is_nothing_to_resume() -> None:
    with pytest.raises(CheckpointError, match="no machine has a checkpoint"):
        choose_checkpoint({})

"""Which checkpoint a run resumes from when its machines have several."""

from __future__ import annotations

import pytest

from shoal.engine.checkpoint import Progress
from shoal.engine.resume import LocalCheckpoint, choose_checkpoint, have_diverged, shared_step
from shoal.errors import CheckpointError


def progress_of(step: int, lineage: str, *history: tuple[str, int]) -> Progress:
    return Progress(step, 10 * step, "9-9", lineage, history)


COMMON = progress_of(40, "1-0")
LEFT = progress_of(90, "5-0", ("1-0", 60))
RIGHT = progress_of(80, "5-1", ("1-0", 60))


def test_a_machine_that_left_early_is_behind_and_has_not_diverged() -> None:
    assert shared_step(COMMON, LEFT) == 40
    assert not have_diverged(COMMON, LEFT)
    assert choose_checkpoint({0: LocalCheckpoint("a", COMMON), 1: LocalCheckpoint("b", LEFT)}) == 1


def test_two_forks_have_diverged_after_their_shared_step() -> None:
    assert shared_step(LEFT, RIGHT) == 60
    assert have_diverged(LEFT, RIGHT)


def test_a_continued_old_lineage_has_diverged_from_its_fork() -> None:
    assert have_diverged(progress_of(70, "1-0"), LEFT)


def test_diverged_checkpoints_are_not_chosen_silently() -> None:
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint({0: LocalCheckpoint("attic", LEFT), 2: LocalCheckpoint("lap", RIGHT)})
    assert "attic has step 90 of lineage 5-0 and lap has step 80 of lineage 5-1" in refused.value.seen
    assert "they share 60 steps" in refused.value.seen
    assert "--lineage 5-0" in refused.value.fix


def test_the_user_may_choose_the_shorter_lineage() -> None:
    assert choose_checkpoint({0: LocalCheckpoint("attic", LEFT), 2: LocalCheckpoint("lap", RIGHT)}, "5-1") == 2


def test_an_unknown_lineage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="lineage 7-7") as refused:
        choose_checkpoint({0: LocalCheckpoint("attic", LEFT), 2: LocalCheckpoint("lap", RIGHT)}, "7-7")
    assert "5-0, 5-1" in refused.value.why


def test_of_equal_checkpoints_that_of_the_lowest_rank_is_chosen() -> None:
    assert choose_checkpoint({3: LocalCheckpoint("a", COMMON), 1: LocalCheckpoint("b", COMMON)}) == 1


def test_no_checkpoint_at_all_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no machine has a checkpoint"):
        choose_checkpoint({})

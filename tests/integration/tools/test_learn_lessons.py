"""Lessons from 9 on as a learner runs them, in the short form.

Exercises cli.learn, tools.learn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.tools.test_learn import LAST, LESSONS, marks_of, play_quick


# Lesson 16 starts torch on two nodes four times; other tests may keep the cores busy meanwhile.
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=marks_of(number)) for number in LESSONS if number > LAST]
)
def test_a_later_lesson_passes_with_the_predictions_of_theory(number: int, tmp_path: Path) -> None:
    play_quick(number, tmp_path)

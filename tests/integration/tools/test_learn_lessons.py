"""Lessons from 9 on as a learner runs them, in the short form.

Exercises cli.learn, tools.learn.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.tools.test_learn import LAST, LESSONS, marks_of, play_quick
from tests.support.programs import shoal


# Lesson 16 starts torch on two nodes four times; other tests may keep the cores busy meanwhile.
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=marks_of(number)) for number in LESSONS if number > LAST]
)
def test_a_later_lesson_passes_with_the_predictions_of_theory(number: int, tmp_path: Path) -> None:
    play_quick(number, tmp_path)


@pytest.mark.long
def test_the_ring_of_lesson_10_counts_the_bytes_that_it_sends(tmp_path: Path) -> None:
    """With numbers of half the size it sends half of the bytes; the rounds are the same."""
    script = (LESSONS[10].path / "ring.py").read_text()
    for text in ("outgoing = chunks[sends]", "torch.empty(CHUNK)"):
        assert text in script
        script = script.replace(text, f"{text}.half()")
    (tmp_path / "ring.py").write_text(script)
    done = shoal("run", "--on", "local:2", "--out", "run", "ring.py", cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "ring-0.json").read_text())
    assert (facts["sent_of_gradients"], len(facts["rounds"])) == (0.5, 2)

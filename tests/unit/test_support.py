"""Helpers in tests/support that many tests rely on: `wait_until` and the reader of a rank's events."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.support.programs import events_of, steps_of
from tests.support.waiting import NotInTime, wait_until, wait_until_async


def test_the_first_true_value_is_returned() -> None:
    values = iter([0, None, "", [3], [4]])
    assert wait_until(lambda: next(values), every_s=0.0) == [3]


def test_the_error_names_what_was_awaited_its_last_value_and_the_details() -> None:
    steps: list[int] = []
    with pytest.raises(NotInTime) as error:
        wait_until(lambda: [step for step in steps if step > 7], 0.05, why=lambda: "rank 1 sleeps")
    text = str(error.value)
    assert text.startswith("not within 0.05 s: ")
    assert "step > 7" in text
    assert text.endswith("last value: []\nrank 1 sleeps")


def test_what_has_no_source_is_named() -> None:
    with pytest.raises(NotInTime, match=r"functools.partial\(<built-in function any>, \[\]\)\nlast value: False$"):
        wait_until(partial(any, []), 0.0)


def test_an_error_of_what_was_awaited_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0)


def test_other_tasks_continue_meanwhile() -> None:
    async def run() -> list[int]:
        arrived: list[int] = []
        asyncio.get_running_loop().call_later(0.01, arrived.append, 5)
        return await wait_until_async(lambda: arrived)

    assert asyncio.run(run()) == [5]
    with pytest.raises(NotInTime, match="last value: 0"):
        asyncio.run(wait_until_async(lambda: 0, 0.0))


def test_events_of_a_run_that_has_not_begun_or_is_writing_can_be_read(tmp_path: Path) -> None:
    assert events_of(tmp_path, "start") == []
    (tmp_path / "events").mkdir()
    file = tmp_path / "events/rank-1.jsonl"
    file.write_text("")
    assert steps_of(tmp_path, 1) == []
    file.write_text('{"event":"start"}\n{"event":"step","step":1}\n{"event":"step","st')
    assert events_of(tmp_path, "start", 1) == [{"event": "start"}]
    assert steps_of(tmp_path, 1) == [{"event": "step", "step": 1}]

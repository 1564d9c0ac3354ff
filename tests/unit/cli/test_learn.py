"""`shoal learn`: the list, wrong usage, and what a result looks like in a narrow terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from shoal.cli.learn import print_result, wrap_command
from shoal.cli.main import run
from shoal.cli.output import stdout_console
from shoal.terminal import printable
from shoal.tools.learn.experiment import Check, Result, Value
from shoal.tools.learn.judge import LessonResult, make_result, write_result
from tests.support.lessons import RecordedExperiment, shoal_lesson


def result_of(out: Path, cores: float = 0.0, **answers: Value) -> LessonResult:
    experiment = RecordedExperiment(out / "02" / "try-1", {}, answers)
    experiment.note_load(cores)
    figures = dict.fromkeys(("gradients", "two", "three", "many", "excess"), 6.65)
    check = Check("each of the nodes sent as much as the others", is_met=False, seen="6.65 and 13.3 MB")
    slow = Check("the exchange took no longer than 2 s", is_met=False, seen="3 s", is_timing=True)
    values: dict[str, Value] = {"two": 6.65, "three": 8.87}
    result = Result(values, values, [check, slow], figures)
    return make_result(shoal_lesson(2).lesson, result, experiment, out, began=1e9)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "60", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return lambda: printable(capsys.readouterr().out).splitlines()


def test_a_result_fits_the_terminal(
    narrow: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    print_result(result_of(tmp_path / "learn", 0.6, two=13.3, three=8.87), tmp_path / "learn", stdout_console(), 3)
    lines = narrow()
    assert [line for line in lines if cell_len(line.rstrip()) > 60 and not line.startswith(("next:", "again:"))] == []
    text = " ".join(" ".join(lines).split())
    assert "prediction 13.3 MB 8.87 MB theory 6.65 MB 8.87 MB measurement 6.65 MB 8.87 MB not within 5%" in text
    assert "✗ each of the nodes sent as much as the others: 6.65 and 13.3 MB" in text
    assert "– the exchange took no longer than 2 s: 3 s (too noisy, repeat)" in text
    assert "not passed (other programs kept 0.6 cores busy)" in text
    assert [(line.split()[0], line.split()[-1]) for line in lines[-2:]] == [("again:", "2"), ("next:", "3")]


def test_nothing_is_explained_with_times_that_others_have_spoiled(tmp_path: Path) -> None:
    """Figures such as -218 ms stood in confident sentences, below "too noisy"."""
    lesson, answers = shoal_lesson(2).lesson, {"two": 6.65, "three": 8.87}
    figures = dict.fromkeys(("gradients", "two", "three", "many", "excess"), 6.65)
    said = {}
    for is_met in (True, False):
        experiment = RecordedExperiment(tmp_path / "02" / "try-1", {}, answers)
        experiment.note_load(0.6)
        result = Result(answers, answers, [Check("it is fast", is_met=is_met, is_timing=True)], figures)
        judged = make_result(lesson, result, experiment, tmp_path, began=1e9)
        assert judged.verdict == "too noisy"
        said[is_met] = judged.explanation
    assert said[True].startswith("The all-reduce has two halves.")
    assert said[False].startswith("Other programs have changed the times")


def test_a_long_command_is_broken_before_options() -> None:
    command = "shoal plan --params 760e6 --links 1gbe,10gbe --nodes 4 --json"
    assert wrap_command(command, 30).splitlines() == [
        "shoal plan --params 760e6 \\",
        "    --links 1gbe,10gbe --nodes 4 \\",
        "    --json",
    ]
    assert wrap_command(command, 80) == command
    quoted = "shoal lab exec node1 -- sh -c 'echo a -b -c'"
    assert wrap_command(quoted, 10).replace(" \\\n    ", " ") == quoted
    assert "    -c 'echo a -b -c'" in wrap_command(quoted, 10)


def test_the_list_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "learn").mkdir()
    write_result(result_of(tmp_path / "learn", two=6.65, three=8.87), tmp_path / "learn")
    assert run(["learn"], debug=False) == 0
    out = capsys.readouterr().out
    assert "2  Count the bytes" in out
    assert "not passed" in out
    assert "0 of " in out
    assert out.endswith("learn 1\n")


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["77"], "there is no lesson 77"),
        (["two"], "there is no lesson two"),
        (["2"], "lesson 2 asks for 2 predictions; given: 0"),
        (["2", "--answer", "6.65"], "lesson 2 asks for 2 predictions; given: 1"),
        (["2", "--answer", "6.65", "--answer", "many"], "'many' is not a number"),
        (["2", "--answer", "6.65", "--yes"], "--yes does not go with --answer"),
        (["--answer", "6.65"], "--answer belongs to a lesson"),
        (["report", "--quick"], "--quick belongs to a lesson"),
        (["report"], "no lesson was done yet"),
        (["--from", "missing"], "missing has no lessons"),
    ],
)
def test_wrong_usage(
    words: list[str],
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert run(["learn", *words], debug=False) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert seen in error
    assert "next:" in error
    assert list(tmp_path.iterdir()) == []

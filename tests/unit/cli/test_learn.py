"""`shoal learn`: the list, wrong usage, and what a result looks like in a narrow terminal."""

from __future__ import annotations

import json
import signal
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
    return make_result(shoal_lesson(2), result, experiment, out, began=1e9)


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
    print_result(
        result_of(tmp_path / "learn", 0.6, two=13.3, three=8.87),
        tmp_path / "learn",
        stdout_console(),
        "shoal learn 2",
        "shoal learn 3",
    )
    lines = narrow()
    assert [line for line in lines if cell_len(line.rstrip()) > 60 and not line.startswith(("next:", "again:"))] == []
    text = " ".join(" ".join(lines).split())
    assert "prediction 13.3 MB 8.87 MB theory 6.65 MB 8.87 MB measurement 6.65 MB 8.87 MB not within 5%" in text
    assert "✗ each of the nodes sent as much as the others: 6.65 and 13.3 MB" in text
    assert "– the exchange took no longer than 2 s: 3 s (too noisy, repeat)" in text
    assert "not passed: wrong: 2 nodes; 1 check failed (✗) (other programs kept 0.6 cores busy)" in text
    assert [(line.split()[0], line.split()[-1]) for line in lines[-2:]] == [("again:", "2"), ("next:", "3")]


def test_nothing_is_explained_with_times_that_others_have_spoiled(tmp_path: Path) -> None:
    """Figures such as -218 ms stood in confident sentences, below "too noisy"."""
    lesson, answers = shoal_lesson(2), {"two": 6.65, "three": 8.87}
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
    (tmp_path / "learn/02.json").write_text("{")
    assert run(["learn"], debug=False) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "damaged: " in out
    assert "mv learn/02.json learn/02.json.bad" in out.replace(f"{tmp_path}/", "")
    assert run(["learn", "--json"], debug=False) == 0
    [listed] = [one for one in json.loads(capsys.readouterr().out)["lessons"] if one["number"] == 2]
    assert (listed["verdict"], listed["passed"]) == ("damaged", False)


CHECK = """
from shoal.tools.learn.experiment import Result
def run(experiment):
    {does}
    return Result({{"a": 1.0}})
"""
TOML = """
number = {number}
title = "t"
seconds = 1
question = "q"
theory = "t"
explanation = "e"
cluster = "c"
[[predict]]
name = "a"
label = "a"
ask = "a?"
kind = "number"
"""


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two lessons of another folder, and --out elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.tools.learn.experiment.busy_cores", lambda: 0.0)
    for number in (100, 101):
        folder = tmp_path / "my course" / str(number)
        folder.mkdir(parents=True)
        (folder / "lesson.toml").write_text(TOML.format(number=number))
        (folder / "check.py").write_text(CHECK.format(does="pass"))
    return tmp_path / "my course"


OPTIONS = ("--from", "my course", "--out", "mine")


def test_the_next_command_has_the_same_folders(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for answer, code in (("9", 1), ("1", 0)):
        assert run(["learn", "100", *OPTIONS, "--answer", answer], debug=False) == code
        lines[answer] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("again:", "next:"))]
    folders = "--from 'my course' --out mine"
    assert [line.partition("learn ")[2] for line in lines["9"]] == [f"100 {folders}", f"101 {folders}"]
    assert [line.partition("learn ")[2] for line in lines["1"]] == [f"101 {folders}"]
    assert run(["learn", *OPTIONS], debug=False) == 0
    assert capsys.readouterr().out.endswith(f"learn 1 {folders}\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_lesson(signum: signal.Signals, course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (course / "100/check.py").write_text(CHECK.format(does=f"__import__('signal').raise_signal({signum.value})"))
    before = {one: signal.getsignal(one) for one in signal.Signals if one in (2, 15, 1)}
    try:
        assert run(["learn", "100", *OPTIONS, "--yes"], debug=False) == 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    error = capsys.readouterr().err
    assert "lesson 100 was interrupted" in error
    assert "learn 100 --from 'my course' --out mine" in error
    assert not (course.parent / "mine/100.json").exists()


def test_a_mistake_of_a_lesson_is_no_bug_in_shoal(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (course / "100/check.py").write_text("def run(experiment):\n    return 1 / 0\n")
    assert run(["learn", "100", *OPTIONS, "--yes"], debug=False) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "my course/100/check.py:2: ZeroDivisionError" in error
    assert "bug in shoal" not in error


def test_a_file_is_no_folder_for_results(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").write_text("")
    for words in ((), ("100", "--yes"), ("report",)):
        assert run(["learn", *words, *OPTIONS], debug=False) == 2
        assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["77"], "there is no lesson 77"),
        (["two"], "there is no lesson two"),
        (["2"], "lesson 2 asks for 2 predictions; given: 0"),
        (["2", "--answer", "6,65"], "write 6.65"),
        (["2", "--answer", "nan", "--answer", "1"], "'nan' is not a number"),
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

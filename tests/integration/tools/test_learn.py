"""Lessons as a learner runs them: `shoal learn N`, in the short form.

Exercises cli.learn, tools.learn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import RunFailed
from shoal.tools.learn import experiment
from shoal.tools.learn.lesson import find_lessons
from tests.support.lessons import silent
from tests.support.needs import HEAVY, need_tool
from tests.support.programs import shoal
from tests.support.waiting import wait_until

# A lesson of minutes in its full form, on a machine that other tests keep busy.
pytestmark = pytest.mark.timeout(330)

# One with a training and one of arithmetic; the others take longer.
SHORT = {1, 3}
# Later ones have files of their own, beside this one.
LAST = 8
LESSONS = find_lessons()

OWN_TOML = """
number = 100
title = "A lesson of the course"
seconds = 5
question = "How many machines does the plan have?"
theory = "as many as you name"
explanation = "It has {rows:.0f}."
cluster = "the same"
[[predict]]
name = "rows"
label = "machines"
ask = "the number of rows"
kind = "number"
"""
OWN_CHECK = """
from shoal.tools.learn.experiment import Experiment, Result

def run(experiment: Experiment) -> Result:
    rows = experiment.shoal("plan", "--nodes", "1,2,4", "--json").json()["rows"]
    said = experiment.python("-c", "print(3)").out
    return Result({"rows": float(said)}, {"rows": float(len(rows))}, figures={"rows": len(rows)})
"""


def write_course(parent: Path, check: str) -> Path:
    folder = parent / "course" / "machines"
    folder.mkdir(parents=True)
    (folder / "lesson.toml").write_text(OWN_TOML)
    (folder / "check.py").write_text(check)
    return folder


def learn(folder: Path, *words: str | Path, code: int = 0) -> dict[str, Any]:
    done = shoal("learn", *words, "--json", cwd=folder, timeout_s=300)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
    return document


def play_quick(number: int, folder: Path) -> dict[str, Any]:
    """Play a lesson in the short form, with the predictions of theory, and check what it leaves."""
    if "lab" in LESSONS[number].lesson.needs:
        need_tool("ip")
    result = learn(folder, str(number), "--yes", "--quick")
    assert result["verdict"] == "passed"
    assert "wrong" not in [one["judgement"] for one in (*result["predictions"], *result["checks"])]
    assert json.loads((folder / f"learn/{number:02}.json").read_text()) == result
    assert (folder / "learn" / result["picture"]).is_file()
    [listed] = [one for one in learn(folder)["lessons"] if one["number"] == number]
    assert (listed["tries"], listed["passed"]) == (1, True)
    return result


def marks_of(number: int) -> list[pytest.MarkDecorator]:
    return [] if number in SHORT else [pytest.mark.long, HEAVY[number % 2]]


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=marks_of(number)) for number in LESSONS if number <= LAST]
)
def test_a_lesson_passes_with_the_predictions_of_theory(number: int, tmp_path: Path) -> None:
    play_quick(number, tmp_path)
    assert Path(learn(tmp_path, "report")["report"]).is_file()


@pytest.mark.parametrize(("load", "why"), [(0.5, "it hangs, or"), (1000.0, "1000 threads want this machine's")])
def test_a_command_that_does_not_end_ends_the_lesson(
    load: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "_TIMEOUT_S", 0.5)
    monkeypatch.setattr("os.getloadavg", lambda: (load,) * 3)
    display = lambda _: contextlib.nullcontext(lambda _: None)  # noqa: E731
    playing = experiment.Experiment(tmp_path / "try-1", tmp_path, {}, display)
    with playing, pytest.raises(RunFailed, match="did not end within") as caught:
        playing.python("-c", "import time; time.sleep(100)")
    assert caught.value.why.startswith(why)


# A command that needs a second to remove what it has made, and would leave it after a second signal.
SLOW = """
import pathlib, time
pathlib.Path("made").touch()
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("made").unlink()
"""
SLOW_CHECK = f"""
def run(experiment):
    experiment.at_end("--version")
    experiment.python("-c", {SLOW!r})
"""


@pytest.mark.parametrize(
    ("signum", "reaches_all"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, True)],
)
def test_an_interrupted_command_cleans_up(signum: signal.Signals, reaches_all: bool, tmp_path: Path) -> None:
    """Ctrl-C and a closed terminal reach all processes, `kill` only the first; then what at_end names is run."""
    folder = write_course(tmp_path, SLOW_CHECK)
    words = ("learn", "100", "--from", folder, "--yes")
    argv = [sys.executable, "-P", "-m", "shoal", *map(str, words)]
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    made = tmp_path / "learn/100/try-1/made"
    wait_until(made.exists)
    (os.killpg if reaches_all else os.kill)(process.pid, signum)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "what it had started has ended" in error
    assert not made.exists()
    assert (made.parent / "commands/02.out").read_text().startswith("shoal ")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("right", "wrong", "gap"),
    [
        ("samples[rank::world_size]", "samples[rank * len(samples) // 3 :]", "gap 2"),
        ("gradient_as_bucket_view=True", "bucket_cap_mb=25", "gap 3"),
        ("dist.get_rank() == 0", "True", "gap 4"),
        ("contextlib.nullcontext() if is_last else model.no_sync()", "contextlib.nullcontext()", "gap 5"),
        ("dist.get_rank(), dist.get_world_size()", "dist.get_rank(), dist.get_world_sise()", "gap 1, init_distributed"),
    ],
)
def test_a_wrong_filling_of_a_gap_is_named(right: str, wrong: str, gap: str, tmp_path: Path) -> None:
    assert learn(tmp_path, "6", code=1)["verdict"] == "not passed"
    solution = (LESSONS[6].path / "solution.py").read_text()
    assert right in solution
    (tmp_path / "learn/06/ddp.py").write_text(solution.replace(right, wrong))
    result = learn(tmp_path, "6", code=1)
    [check] = [one for one in result["checks"] if one["judgement"] == "wrong"]
    assert gap in f"{check['text']}: {check['seen']}"


def test_a_lesson_of_another_folder_is_played(tmp_path: Path) -> None:
    folder = write_course(tmp_path, OWN_CHECK)
    words = ("100", "--from", tmp_path / "course")
    assert learn(tmp_path, *words, "--answer", "3")["verdict"] == "passed"
    wrong = learn(tmp_path, *words, "--answer", "4", code=1)
    assert (wrong["verdict"], len(wrong["tries"])) == ("not passed", 2)
    refused = learn(tmp_path, *words, code=2)["error"]
    assert "lesson 100 asks for 1 prediction; given: 0" in " ".join(refused.split())
    (folder / "check.py").write_text(OWN_CHECK.replace('"--nodes"', '"--ndoes"'))
    assert "No such option: --ndoes" in learn(tmp_path, *words, "--yes", code=3)["error"]


def test_commands_of_a_lesson_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exercises tools.learn.experiment."""
    monkeypatch.setattr(experiment, "this_machine_is_cpu_only", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with experiment.Experiment(tmp_path / "try-1", tmp_path, {}, silent) as one:
        seen = one.python("-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))").out
    assert seen == "''\n"

"""Reading lessons and predictions, judging them, and what is stored."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import ConfigError, RunFailed, UsageError
from shoal.host.topology import Core, Quota, Topology
from shoal.tools.learn.experiment import Check, Experiment, FinishedCommand, Result, Value
from shoal.tools.learn.judge import (
    explain_lesson,
    judge,
    make_result,
    next_folder,
    read_answers,
    read_result,
    read_results,
    result_path,
    verdict_of,
    write_result,
)
from shoal.tools.learn.lesson import Lesson, Question, find_lesson, find_lessons, read_lesson
from shoal.tools.learn.page import render_page, write_page
from shoal.tools.learn.picture import draw_picture
from shoal.tools.learn.run import check_needs, play
from tests.support.lessons import Recorded, RecordedExperiment, shoal_lesson, silent
from tests.support.paths import ROOT

TEXT = """
number = 100
title = "A lesson of mine"
seconds = 5
question = "How many?"
theory = "as many as there are"
explanation = "It was {count:.1f}."
cluster = "the same"
[[predict]]
name = "count"
label = "count"
ask = "how many"
kind = "number"
unit = "MB"
[[predict]]
name = "ms"
label = "time"
ask = "how long"
kind = "number"
unit = "ms"
within = "2x"
is_timing = true
[[predict]]
name = "why"
label = "why"
ask = "why"
kind = "text"
"""
CHECK = """
from shoal.tools.learn.experiment import Experiment, Result
def run(experiment: Experiment) -> Result:
    return Result(theory={"count": 3.0, "ms": 10.0}, measured={"count": 3.1, "ms": 11.0}, figures={"count": 3.1})
"""


def make_lesson(folder: Path, text: str = TEXT, check: str = CHECK) -> Path:
    folder.mkdir(parents=True)
    (folder / "lesson.toml").write_text(text)
    (folder / "check.py").write_text(check)
    return folder


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    return read_lesson(make_lesson(tmp_path / "mine")).lesson


def question(**values: object) -> Question:
    return Question.model_validate({"name": "a", "label": "a", "ask": "a?", "kind": "number", **values})


@pytest.mark.parametrize(
    ("within", "answer", "is_near"),
    [
        ("5%", 104.9, True), ("5%", 105.1, False), ("5%", 94.9, False),
        ("2x", 199.0, True), ("2x", 201.0, False), ("2x", 49.0, False), ("2x", -100.0, False),
        ("15", 115.0, True), ("15", 115.1, False),
    ],
)  # fmt: skip
def test_a_number_is_judged_by_its_distance(within: str, answer: float, is_near: bool) -> None:
    assert question(within=within).is_near(answer, 100.0) is is_near


def test_a_choice_may_be_shortened() -> None:
    asked = question(kind="choice", choices=("cores", "all-reduce", "waiting"))
    assert asked.read("Co") == "cores"
    assert question(kind="choice", choices=("no", "not yet")).read("no") == "no"
    with pytest.raises(UsageError, match="none of the answers"):
        asked.read("x")


def test_predictions_are_read_in_order_by_name_or_from_one_word(lesson: Lesson) -> None:
    expected: dict[str, Value] = {"count": 6.65, "ms": 12.0, "why": "x"}
    assert read_answers(lesson, ["6.65 MB", "12", "x"]) == expected
    assert read_answers(lesson, ["why=x", "ms=12ms", "count=6.65"]) == expected


@pytest.mark.parametrize(
    ("words", "seen", "fix"),
    [
        ([], "asks for 3 predictions; given: 0", "--answer COUNT"),
        (["1"], "given: 1; missing: ms; missing: why", "--answer COUNT"),
        (["1", "2", "3", "4"], "given: 4", "--answer COUNT"),
        (["many", "2", "x"], "'many' is not a number", "such as 12.5"),
        (["count=1", "count=2", "x"], "given: 3; twice: count; missing: ms", "--answer COUNT"),
        (["ms=1", "2", "x"], "given: 3; twice: ms; missing: count", "--answer COUNT"),
        (["6,65"], "'6,65' is not a number", "write 6.65"),
        (["6,65 MB", "12", "x"], "'6,65 MB' is not a number", "write 6.65"),
        *((["1", word, "x"], f"'{word}' is not a number", "such as 12.5") for word in ("nan", "inf", "-1e400")),
    ],
)
def test_wrong_predictions_are_refused_with_what_is_asked(
    lesson: Lesson, words: list[str], seen: str, fix: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_answers(lesson, words)
    assert seen in refused.value.seen
    assert "how" in refused.value.why
    assert fix in refused.value.fix


def test_a_text_has_the_form_that_its_lesson_asks_for() -> None:
    asked = question(kind="text", ask="two letters, such as ab", pattern="[a-c]{2}")
    assert asked.read(" ac ") == "ac"
    with pytest.raises(UsageError, match="'abc' does not have the form of an answer") as refused:
        asked.read("abc")
    assert refused.value.fix == "give two letters, such as ab"
    with pytest.raises(ValueError, match="a pattern belongs to"):
        question(pattern="a")


def played(lesson: Lesson, result: Result, folder: Path, cores: float, quick: bool, **answers: Value) -> list[str]:
    experiment = RecordedExperiment(folder, {}, answers)
    experiment.is_quick = quick
    experiment.note_load(cores)
    predictions, checks = judge(lesson, result, experiment)
    return [
        verdict_of([*predictions, *checks]),
        *(one.judgement for one in predictions),
        *(one.judgement for one in checks),
    ]


def test_times_are_not_judged_on_a_busy_machine_or_in_the_short_form(lesson: Lesson, tmp_path: Path) -> None:
    checks = [Check("order", is_met=True), Check("speed", is_met=False, is_timing=True)]
    result = Result({"count": 3.0, "ms": 10.0}, {"count": 3.1, "ms": 11.0}, checks)
    right: dict[str, Value] = {"count": 3.0, "ms": 11.0, "why": "x"}
    assert played(lesson, result, tmp_path, 0.1, False, **right) == [
        "not passed", "right", "right", "not judged", "right", "wrong",
    ]  # fmt: skip
    assert played(lesson, result, tmp_path, 0.6, False, **right) == [
        "too noisy", "right", "too noisy", "not judged", "right", "too noisy",
    ]  # fmt: skip
    assert played(lesson, result, tmp_path, 0.6, True, **right)[0] == "passed"
    # What is exact is judged however busy the machine is.
    assert played(lesson, result, tmp_path, 0.6, False, **right | {"count": 9.0})[0] == "not passed"


def test_a_measurement_that_failed_is_wrong_and_theory_judges_without_one(lesson: Lesson, tmp_path: Path) -> None:
    theory: dict[str, Value] = {"count": 3.0, "ms": 10.0}
    assert played(lesson, Result(theory, {"count": None, "ms": None}), tmp_path, 0.6, True)[1:3] == ["wrong"] * 2
    assert played(lesson, Result(theory), tmp_path, 0.0, False, count=3.0, ms=30.0)[1:3] == ["right", "wrong"]


def test_an_explanation_names_a_figure_that_is_not_there(tmp_path: Path) -> None:
    folder = read_lesson(make_lesson(tmp_path / "mine", TEXT.lstrip()))
    assert explain_lesson(folder, {"count": 2}) == "It was 2.0."
    for figures, seen in (({"number": 2}, "'count'"), ({"count": "two"}, "'f'"), ({"count": None}, "NoneType")):
        with pytest.raises(ConfigError, match=rf"lesson.toml:6: the explanation .* cannot be filled: .*{seen}"):
            explain_lesson(folder, figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (('kind = "text"', 'kind = "essay"'), "wrong value of predict.2.kind"),
        (("seconds = 5", "secnods = 5"), "lesson.toml"),
        (('kind = "text"', 'kind = "text"\npattern = "("'), "wrong value of predict.2.pattern"),
        (('within = "2x"', 'within = "near"'), "wrong value of predict.1.within"),
        (("number = 100", "number = "), "is not valid TOML"),
        (("seconds = 5", "seconds = 500"), "wrong value of seconds"),
    ],
)
def test_a_wrong_lesson_is_refused(change: tuple[str, str], seen: str, tmp_path: Path) -> None:
    folder = make_lesson(tmp_path / "mine", TEXT.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(seen)):
        read_lesson(folder)


def test_lessons_of_other_folders_are_added(tmp_path: Path) -> None:
    make_lesson(tmp_path / "course" / "mine")
    lessons = find_lessons([tmp_path / "course"])
    assert find_lesson("100", lessons).lesson.title == "A lesson of mine"
    assert find_lessons([tmp_path / "course" / "mine"]).keys() == lessons.keys()
    with pytest.raises(UsageError, match="there is no lesson 99"):
        find_lesson("99", lessons)
    with pytest.raises(UsageError, match="has no lessons"):
        find_lessons([tmp_path])
    make_lesson(tmp_path / "course" / "other")
    with pytest.raises(ConfigError, match="two lessons have the number 100"):
        find_lessons([tmp_path / "course"])


@pytest.mark.parametrize("check", ["", "run = 3"])
def test_a_lesson_without_a_function_is_refused(check: str, tmp_path: Path) -> None:
    folder = read_lesson(make_lesson(tmp_path / "mine", check=check))
    with pytest.raises(ConfigError, match="has no function `run`"):
        folder.load_check()


@pytest.mark.parametrize(
    ("check", "seen"),
    [
        ("import json\nx = (\n", "check.py:2: SyntaxError"),
        ("import no_such_module\n", "check.py:1: ModuleNotFoundError"),
        ("def run(experiment):\n    return helper()\n\ndef helper():\n    return 1 / 0\n", "check.py:5: ZeroDivision"),
        ("import json\ndef run(experiment):\n    json.loads('x')\n", "check.py:3: JSONDecodeError"),
        ("def run(experiment):\n    pass\n", "check.py returned no Result"),
    ],
)
def test_a_mistake_in_a_check_is_named_with_its_line(check: str, seen: str, tmp_path: Path) -> None:
    folder = read_lesson(make_lesson(tmp_path / "mine", check=check))
    with pytest.raises(ConfigError, match=re.escape(seen)):
        folder.load_check()(RecordedExperiment(tmp_path, {}, {}))


def test_a_failure_of_a_command_is_no_mistake_in_the_check(tmp_path: Path) -> None:
    fails = "from shoal.errors import RunFailed\ndef run(experiment):\n    raise RunFailed('no route')\n"
    folder = read_lesson(make_lesson(tmp_path / "mine", check=fails))
    with pytest.raises(RunFailed, match="no route"):
        folder.load_check()(RecordedExperiment(tmp_path, {}, {}))


def test_the_lesson_of_the_documentation_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.learn.experiment.this_machine_is_cpu_only", lambda: True)
    page = (ROOT / "docs/learn.md").read_text()
    toml, check = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "python"))
    folder = read_lesson(make_lesson(tmp_path / "mine", toml[0], check[0]))
    manifest = {"step_s_measured": 0.1, "byte_equivalent": True}
    experiment = RecordedExperiment(
        tmp_path, {"shoal train --on local:2": manifest}, read_answers(folder.lesson, ["90"])
    )
    result = folder.load_check()(experiment)
    assert explain_lesson(folder, result.figures).endswith("100 is a figure that check.py returns.")
    predictions, checks = judge(folder.lesson, result, experiment)
    assert verdict_of([*predictions, *checks]) == "passed"


def test_predictions_of_the_documentation_are_read() -> None:
    assert read_answers(shoal_lesson(2).lesson, ["5", "7.5"]) == {"two": 5.0, "three": 7.5}


def test_tries_are_kept_and_a_page_shows_them(tmp_path: Path) -> None:
    folder, out = read_lesson(make_lesson(tmp_path / "mine")), tmp_path / "learn"
    for count in (9.0, 3.0, 8.0, 3.0):
        experiment = RecordedExperiment(next_folder(out, 100), {}, {"count": count, "ms": 10.0, "why": "<b>"})
        result = folder.load_check()(experiment)
        judged = make_result(folder, result, experiment, out, began=1e9)
        draw_picture(result.picture, "title", judged.predictions, out / judged.picture)
        write_result(judged, out)
        if count == 8.0:
            page = render_page(read_results(out), out)
            assert "passed (last try: not passed)" in page
            assert "1 passed of 1 lesson tried" in page
    stored = read_result(result_path(out, 100))
    assert stored == judged
    assert [one.verdict for one in judged.tries] == ["not passed", "passed", "not passed", "passed"]
    page = render_page(read_results(out), out)
    assert "data:image/png;base64," in page
    assert "It was 3.1." in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert write_page(out).read_text() == page


def test_an_interrupted_try_is_not_kept_and_a_busy_machine_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tools.learn.experiment.busy_cores", lambda: 1.5)
    interrupt = "def run(experiment):\n    raise KeyboardInterrupt\n"
    folder, sentences = read_lesson(make_lesson(tmp_path / "mine", check=interrupt)), list[str]()
    with pytest.raises(KeyboardInterrupt):
        play(folder, tmp_path / "learn", {}, silent, sentences.append)
    assert sentences == ["other programs keep 1.5 cores busy now: it takes longer, and times are not judged"]
    assert read_results(tmp_path / "learn") == {}


def test_a_damaged_result_is_named_before_the_lesson_and_on_the_page(lesson: Lesson, tmp_path: Path) -> None:
    path = result_path(tmp_path, 100)
    path.write_text('{"number": 100}')
    with pytest.raises(UsageError, match=re.escape(f"{path} cannot be used")) as refused:
        check_needs(lesson, tmp_path)
    assert f"damaged: {refused.value.fix}" in write_page(tmp_path).read_text()
    with pytest.raises(UsageError, match="no lesson was done yet"):
        write_page(tmp_path / "none")


@pytest.mark.parametrize(
    ("can_limit", "cpus", "quota", "why"),
    [
        (False, 8, None, "it needs a control group with a cpu controller"),
        (True, 1, None, "its nodes need two cores, and 1 is usable here"),
        (True, 8, Quota(1.5, "cpu.max"), "its nodes need two cores, and 1.5 is usable here"),
        (True, 2, None, ""),
    ],
)
def test_a_lesson_that_limits_cpus_needs_two_and_a_control_group(
    can_limit: bool, cpus: int, quota: Quota | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "shoal.tools.learn.run"
    monkeypatch.setattr(f"{place}.require_lab", lambda: None)
    monkeypatch.setattr(f"{place}.can_limit_cpu", lambda: can_limit)
    monkeypatch.setattr(f"{place}.usable_cpus", lambda: (set(range(cpus)),) * 2)
    monkeypatch.setattr(f"{place}.this_topology", lambda: Topology((Core(),) * cpus, quota))
    expected = pytest.raises(UsageError, match="lesson 8 cannot be played here") if why else contextlib.nullcontext()
    with expected as refused:
        check_needs(shoal_lesson(8).lesson, tmp_path)
    assert refused is None or refused.value.why.startswith(why)


class Failing(Experiment):
    def execute(self, shown: str, words: object, update: object) -> FinishedCommand:
        return FinishedCommand(shown, 3, "", "note: x\nerror: no route\n", 0.1)


def test_a_command_that_fails_ends_the_lesson_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.learn.experiment.this_machine_is_cpu_only", lambda: True)
    with Failing(tmp_path / "try-1", tmp_path, {}, silent) as experiment:
        experiment.at_end("lab", "down")
        with pytest.raises(RunFailed) as failed:
            experiment.shoal("train", "--steps", "3")
        assert experiment.shoal("verify", codes=(3,)).code == 3
    assert failed.value.seen == "shoal train --steps 3 ended with exit code 3"
    assert "error: no route" in failed.value.why
    assert experiment.commands[-1].command == "shoal lab down"


@pytest.mark.parametrize("number", [10, 11, 16])
def test_a_lab_is_removed_also_if_its_start_is_interrupted(number: int, tmp_path: Path) -> None:
    recorded: dict[str, Recorded] = {"lab up": FinishedCommand("lab up", 130, "", "", 0.1), "lab down": ""}
    with pytest.raises(RunFailed), RecordedExperiment(tmp_path / "try-1", recorded, {}) as experiment:
        shoal_lesson(number).load_check()(experiment)
    assert f"shoal lab down --name learn-{number}-" in experiment.commands[-1].command


def test_a_lab_is_removed_also_if_the_terminal_was_closed(tmp_path: Path) -> None:
    def closed(_: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        raise OSError(errno.EIO, "Input/output error")

    with RecordedExperiment(tmp_path / "try-1", {"lab down": ""}, {}) as experiment:
        experiment.at_end("lab", "down")
        experiment._display = closed
    assert experiment.commands[-1].command.endswith("shoal lab down")


def test_a_lesson_computes_on_this_many_cores_and_on_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = Topology(tuple(Core((core, core + 8)) for core in range(8)))
    monkeypatch.setattr("shoal.tools.learn.experiment.this_topology", lambda: eight)
    monkeypatch.setattr("shoal.tools.learn.experiment.this_machine_is_cpu_only", lambda: False)
    with RecordedExperiment(tmp_path / "try-1", {"shoal": "{}"}, {}) as experiment:
        pinned = experiment.shoal("train", cores=2).command
        experiment.shoal("train", cores=8)
    assert pinned == "CUDA_VISIBLE_DEVICES= taskset --cpu-list 0,1,8,9 shoal train"
    assert experiment.commands[-1].command == "CUDA_VISIBLE_DEVICES= shoal train"


@pytest.mark.parametrize(("cores", "most"), [(2, 0.25), (5, 0.25), (16, 0.8)])
def test_more_may_be_busy_of_many_cores(
    cores: int, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tools.learn.experiment.this_topology", lambda: Topology((Core(),) * cores))
    experiment = RecordedExperiment(tmp_path, {}, {})
    experiment.note_load(most - 0.01)
    assert not experiment.is_disturbed
    experiment.note_load(most)
    assert experiment.is_disturbed

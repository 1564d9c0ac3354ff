"""Judge a lesson: predictions against the measurement, the checks of the experiment, and the stored result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError, DataError, UsageError
from shoal.run_folder import write_atomically
from shoal.tools.learn.experiment import Experiment, Result, Value
from shoal.tools.learn.lesson import Lesson, LessonFolder, Question
from shoal.units import pluralize

# Of one prediction or check.
Judgement: TypeAlias = Literal["right", "wrong", "too noisy", "not judged"]
# Of the lesson. "too noisy": what is exact was right, and times are to be measured again on a quiet machine.
LessonVerdict: TypeAlias = Literal["passed", "not passed", "too noisy"]

_SPOILED = "Other programs have changed the times of this try so much that there is nothing to explain with them."


class LessonRecord(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class JudgedRecord(LessonRecord):
    judgement: Judgement


class JudgedPrediction(JudgedRecord):
    name: str
    label: str
    ask: str
    unit: str
    # As they are shown, with unit, and the numbers or words themselves.
    shown: dict[str, str]
    prediction: Value | None
    theory: Value | None
    measured: Value | None
    within: str


class JudgedCheck(JudgedRecord):
    text: str
    seen: str


class CommandRecord(LessonRecord):
    command: str
    seconds: float


class Try(LessonRecord):
    time: float
    predictions: dict[str, Value]
    verdict: LessonVerdict


class LessonResult(LessonRecord):
    """The document `learn/NN.json`: the newest try, and a line for each before."""

    shoal_lesson: Literal[1] = 1
    number: int
    title: str
    question: str
    time: float
    seconds: float
    quick: bool
    took_theory: bool  # --yes: the predictions are not the learner's own
    verdict: LessonVerdict
    predictions: list[JudgedPrediction]
    checks: list[JudgedCheck]
    theory: str
    explanation: str
    cluster: str
    commands: list[CommandRecord]
    other_programs_cores: float
    folder: str
    picture: str
    tries: list[Try]

    @property
    def is_passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def was_passed(self) -> bool:
        return any(one.verdict == "passed" for one in self.tries)


def read_answers(lesson: Lesson, words: Sequence[str]) -> dict[str, Value]:
    """Return the predictions of `--answer`, in the order of the questions, or as NAME=WORD."""
    names = [question.name for question in lesson.predict]
    given: dict[str, list[Value]] = {name: [] for name in names}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals or name not in given:
            name, value = names[number] if number < len(names) else "", word
        if name:
            given[name].append(lesson.predict[names.index(name)].read(value))
    if len(words) != len(names) or not all(given.values()):
        counts = {name: len(values) for name, values in given.items()}
        twice = [f"twice: {name}" for name, count in counts.items() if count > 1]
        missing = [f"missing: {name}" for name, count in counts.items() if not count and words]
        asked = "; ".join(f"{question.name}: {question.ask}" for question in lesson.predict) or "nothing"
        raise UsageError(
            f"lesson {lesson.number} asks for {pluralize(len(names), 'prediction')}; given: "
            + "; ".join([str(len(words)), *twice, *missing]),
            why=f"it asks for: {asked}",
            fix=" ".join([f"shoal learn {lesson.number}", *(f"--answer {name.upper()}" for name in names)]),
        )
    return {name: value for name, [value] in given.items()}


def judge(lesson: Lesson, result: Result, experiment: Experiment) -> tuple[list[JudgedPrediction], list[JudgedCheck]]:
    """Compare predictions with what was measured, or with theory where nothing is; and the checks."""
    return _judge(lesson, result, experiment, experiment.is_disturbed)


def _judge(
    lesson: Lesson, result: Result, experiment: Experiment, is_noisy: bool
) -> tuple[list[JudgedPrediction], list[JudgedCheck]]:
    def timed(is_right: bool, is_timing: bool) -> Judgement:
        if is_timing and (experiment.is_quick or is_noisy):
            return "not judged" if experiment.is_quick else "too noisy"
        return "right" if is_right else "wrong"

    answers = {**result.theory, **experiment.answers}
    predictions = [
        _judge_prediction(question, answers.get(question.name), result, timed) for question in lesson.predict
    ]
    checks = [
        JudgedCheck(text=check.text, seen=check.seen, judgement=timed(check.is_met, check.is_timing))
        for check in result.checks
    ]
    return predictions, checks


def _judge_prediction(
    question: Question, answer: Value | None, result: Result, timed: Callable[[bool, bool], Judgement]
) -> JudgedPrediction:
    theory = result.theory.get(question.name)
    measured = result.measured.get(question.name)
    target = result.measured.get(question.name, theory)
    judgement: Judgement = "not judged"
    if question.kind != "text":
        is_right = answer is not None and target is not None and question.is_near(answer, target)
        # A measurement that failed is wrong on any machine.
        judgement = "wrong" if target is None else timed(is_right, question.is_timing)
    values = {"prediction": answer, "theory": theory, "measurement": measured}
    return JudgedPrediction(
        name=question.name,
        label=question.label,
        ask=question.ask,
        unit=question.unit,
        shown={what: question.show(value) for what, value in values.items()},
        prediction=answer,
        theory=theory,
        measured=measured,
        within=question.distance,
        judgement=judgement,
    )


def verdict_of(judged: Sequence[JudgedRecord]) -> LessonVerdict:
    judgements = {one.judgement for one in judged}
    return "not passed" if "wrong" in judgements else "too noisy" if "too noisy" in judgements else "passed"


def explain_lesson(folder: LessonFolder, figures: Mapping[str, Value]) -> str:
    """Return the explanation with the figures of this try."""
    try:
        return folder.lesson.explanation.format(**figures)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder.place_of('explanation')}: the explanation has a field that cannot be filled: {error}",
            why=f"its check returned the figures {', '.join(figures) or '(none)'}",
            fix="name one of them in lesson.toml, or add it in check.py: Result(…, figures={…})",
        ) from None


def result_path(out: Path, number: int) -> Path:
    return out / f"{number:02}.json"


def make_result(folder: LessonFolder, result: Result, experiment: Experiment, out: Path, began: float) -> LessonResult:
    """Judge the lesson and add this try to those before."""
    lesson = folder.lesson
    predictions, checks = judge(lesson, result, experiment)
    verdict = verdict_of([*predictions, *checks])
    before = read_result(result_path(out, lesson.number))
    given = {one.name: one.prediction for one in predictions if one.prediction is not None}
    on_quiet = _judge(lesson, result, experiment, is_noisy=False)
    is_spoiled = verdict == "too noisy" and verdict_of([*on_quiet[0], *on_quiet[1]]) != "passed"
    return LessonResult(
        number=lesson.number,
        title=lesson.title,
        question=lesson.question,
        time=began,
        seconds=round(time.time() - began, 1),
        quick=experiment.is_quick,
        took_theory=experiment.takes_theory,
        verdict=verdict,
        predictions=predictions,
        checks=checks,
        theory=lesson.theory,
        explanation=_SPOILED if is_spoiled else explain_lesson(folder, result.figures),
        cluster=lesson.cluster,
        commands=[CommandRecord(command=one.command, seconds=round(one.seconds, 2)) for one in experiment.commands],
        other_programs_cores=round(experiment.other_cores, 2),
        folder=str(experiment.folder.relative_to(out)),
        picture=str(experiment.folder.relative_to(out) / "picture.png"),
        tries=[*(before.tries if before else []), Try(time=began, predictions=given, verdict=verdict)],
    )


def write_result(result: LessonResult, out: Path) -> Path:
    path = result_path(out, result.number)
    write_atomically(path, result.model_dump_json(indent=2) + "\n")
    return path


def read_result(path: Path) -> LessonResult | None:
    """Return a stored result; None if the lesson was not tried."""
    try:
        return LessonResult.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} values are not as expected"
        raise DataError(
            f"{path} cannot be used: {reason}",
            why="shoal learn writes it whole; it was changed or truncated since",
            fix=f"move it away: mv {path} {path}.bad",
        ) from None


def read_results(out: Path) -> dict[int, LessonResult | DataError]:
    """Return the results of all lessons that were tried, by number. A damaged one is an error, beside the others."""
    results: dict[int, LessonResult | DataError] = {}
    for number, path in sorted((int(path.stem), path) for path in out.glob("*.json") if path.stem.isdecimal()):
        try:
            if result := read_result(path):
                results[number] = result
        except DataError as error:
            results[number] = error
    return results


def next_folder(out: Path, number: int) -> Path:
    """Create and return the folder of the next try."""
    for tried in range(1, 10_000):
        folder = out / f"{number:02}" / f"try-{tried}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise UsageError(f"{out / f'{number:02}'} has too many tries", fix="remove those that are not needed")

"""A lesson is a folder: `lesson.toml` says what is asked and explained, and `run` of `check.py` does the experiment."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.presets import did_you_mean
from shoal.errors import ConfigError, ShoalError, UsageError
from shoal.tools.learn.experiment import Experiment, Result, Value
from shoal.units import format_number, format_spans, to_spans

LESSONS = Path(__file__).with_name("lessons")

# Units that stand beside the number.
_CLOSE = ("", "%", "×")
_WITHIN = re.compile(r"(\d+(?:\.\d+)?)(%|x|)")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")


class Question(BaseModel):
    """One value that the learner predicts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern="^[a-z][a-z0-9_]*$")  # of the value in `Result.theory` and `Result.measured`
    label: str  # the title of its column
    ask: str
    kind: Literal["number", "choice", "text"]  # a text is kept and not judged
    unit: str = ""
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None  # what a text must match, before the experiment
    # How near a number must be: "5%", "2x" (between half and double), or "15" (in its unit).
    within: str = "5%"
    # Whether other programs on the machine change the measured value.
    is_timing: bool = False

    @field_validator("within")
    @classmethod
    def _is_a_distance(cls, value: str) -> str:
        if not _WITHIN.fullmatch(value):
            raise ValueError('write "5%", "2x" or "15"')
        return value

    @model_validator(mode="after")
    def _has_choices(self) -> Question:
        if (self.kind == "choice") != bool(self.choices):
            raise ValueError('choices = ["yes", "no"] belong to kind = "choice"')
        if self.pattern is not None and self.kind != "text":
            raise ValueError('a pattern belongs to kind = "text"')
        return self

    def read(self, text: str) -> Value:
        """Return what was typed as a value of this kind; refuse what is none."""
        text = text.strip()
        if self.kind == "number":
            return self._read_number(text)
        if self.kind == "choice":
            meant = [choice for choice in self.choices if choice.lower().startswith(text.lower())] if text else []
            exact = [choice for choice in meant if choice.lower() == text.lower()]
            if len(exact or meant) != 1:
                words = ", ".join(self.choices)
                raise UsageError(
                    f"{text!r} is none of the answers", why=f"{self.label}: {self.ask}", fix=f"answer one of: {words}"
                )
            return (exact or meant)[0]
        if self.pattern is not None and not self.pattern.fullmatch(text):
            raise UsageError(f"{text!r} does not have the form of an answer to {self.label}", fix=f"give {self.ask}")
        return text

    def _read_number(self, text: str) -> float:
        number = text.removesuffix(self.unit).strip()
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(number)):
                return value
        unit = f" in {self.unit}" if self.unit else ""
        fix = (
            f"write {number.replace(',', '.')}" if _DECIMAL_COMMA.fullmatch(number) else f"a number{unit}, such as 12.5"
        )
        raise UsageError(f"{text!r} is not a number", why=f"{self.label}: {self.ask}", fix=fix)

    def is_near(self, answer: Value, target: Value) -> bool:
        """Return whether an answer is right: near enough, or the same word."""
        if self.kind != "number":
            return str(answer).lower() == str(target).lower()
        answer, target = float(answer), float(target)
        match = _WITHIN.fullmatch(self.within)
        assert match is not None  # noqa: S101 - it was validated
        distance = float(match[1])
        if match[2] == "x":
            return answer > 0 and target > 0 and 1 / distance <= answer / target <= distance
        return abs(answer - target) <= (distance / 100 * abs(target) if match[2] == "%" else distance)

    def show(self, value: Value | None) -> str:
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        return f"{format_number(value)}{self.unit if self.unit in _CLOSE else f' {self.unit}'}"

    @property
    def distance(self) -> str:
        """Return in words how near a number must be."""
        match = _WITHIN.fullmatch(self.within)
        if self.kind != "number" or match is None:
            return ""
        number, form = match.groups()
        if form == "x":
            return f"within {number}×"
        points = " points" if self.unit == "%" else f" {self.unit}"
        return f"within {number}%" if form == "%" else f"within {number}{points}"


class Lesson(BaseModel):
    """What `lesson.toml` has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = Field(ge=1)
    title: str
    seconds: int = Field(ge=1, le=180)  # on two quiet cores
    # lab: emulated nodes, so root or user namespaces; cpu limits: two cores, and a control group that limits them.
    needs: tuple[Literal["lab", "cpu limits"], ...] = ()
    question: str  # what is asked and why, before the predictions
    predict: tuple[Question, ...] = ()
    theory: str  # the formula or the reason, in one sentence
    # One paragraph after the measurement. `{name}` is a figure of the result: `{sent:.2f}`.
    explanation: str
    cluster: str  # what the same is called, and how it looks, on a large cluster

    @field_validator("question", "theory", "explanation", "cluster")
    @classmethod
    def _is_one_paragraph(cls, value: str) -> str:
        return " ".join(value.split())


@dataclass(frozen=True)
class LessonFolder:
    """A lesson and where it is."""

    path: Path
    lesson: Lesson

    def place_of(self, key: str) -> str:
        """Return the file and the line of a key of lesson.toml."""
        file = self.path / "lesson.toml"
        lines = file.read_text(encoding="utf-8").splitlines()
        return f"{file}:{next((number for number, line in enumerate(lines, 1) if line.startswith(key)), 1)}"

    def load_check(self) -> Callable[[Experiment], Result]:
        """Import check.py and return its `run`, whose mistakes are errors that name their line."""
        file = (self.path / "check.py").absolute()  # as tracebacks have it
        spec = importlib.util.spec_from_file_location(f"shoal_lesson_{self.lesson.number}", file)
        if not file.is_file() or spec is None or spec.loader is None:
            raise ConfigError(f"the lesson {self.path} has no check.py", why="its function `run` does the experiment")
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look up their module there.
        sys.modules[spec.name] = module
        with _mistakes_of(file):
            spec.loader.exec_module(module)
        run = getattr(module, "run", None)
        if not callable(run):
            raise _wrong_check(f"{file} has no function `run`")

        def checked_run(experiment: Experiment) -> Result:
            with _mistakes_of(file):
                result = run(experiment)
            if not isinstance(result, Result):
                raise _wrong_check(f"`run` of {file} returned no Result")
            return result

        return checked_run


def _wrong_check(seen: str) -> ConfigError:
    why = "shoal calls run(experiment), which returns a Result"
    return ConfigError(seen, why=why, fix="docs/learn.md has an example")


@contextlib.contextmanager
def _mistakes_of(file: Path) -> Iterator[None]:
    """Name the line of a check.py that raised: it may be an instructor's, and is no bug in shoal."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        raise ConfigError(
            f"{':'.join(map(str, [file, *lines[-1:]]))}: {type(error).__name__}: {error}",
            why="check.py is a program of the lesson, and it failed there",
            fix="correct it, or report it to the lesson's author; --debug prints the traceback",
        ) from error


def read_lesson(path: Path) -> LessonFolder:
    file = path / "lesson.toml"
    try:
        return LessonFolder(path, Lesson.model_validate(tomllib.loads(file.read_text(encoding="utf-8"))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", fix="see https://toml.io for the format") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place, last = ".".join(map(str, first["loc"])), str(first["loc"][-1]) if first["loc"] else ""
        is_unknown = first["type"] == "extra_forbidden"
        names = [*Lesson.model_fields, *Question.model_fields]
        why = did_you_mean(last, names) if is_unknown else first["msg"].removeprefix("Value error, ")
        what = f"unknown key {place}" if is_unknown else f"wrong value of {place}"
        raise ConfigError(f"{what} in {file}", why=why, fix="docs/learn.md lists the keys") from None


def find_lessons(folders: Sequence[Path] = ()) -> dict[int, LessonFolder]:
    """Return all lessons by number: shoal's own, and those of other folders. A number belongs to one lesson."""
    paths = sorted(file.parent for file in LESSONS.glob("*/lesson.toml"))
    for folder in folders:
        added = sorted(file.parent for file in [*folder.glob("lesson.toml"), *folder.glob("*/lesson.toml")])
        if not added:
            raise UsageError(
                f"{folder} has no lessons",
                why="a lesson is a folder with lesson.toml and check.py; --from names it, or the folder that has some",
                fix="docs/learn.md shows how to write one",
            )
        paths += added
    lessons: dict[int, LessonFolder] = {}
    for path in paths:
        one = read_lesson(path)
        other = lessons.setdefault(one.lesson.number, one)
        if other is not one:
            raise ConfigError(
                f"two lessons have the number {one.lesson.number}: {other.path.name} and {one.path.name}",
                fix=f"choose another number in {path / 'lesson.toml'}, such as {max(lessons) + 100}",
            )
    return dict(sorted(lessons.items()))


def find_lesson(word: str, lessons: dict[int, LessonFolder]) -> LessonFolder:
    number = int(word) if word.isdecimal() else 0
    if number not in lessons:
        raise UsageError(
            f"there is no lesson {word}",
            why=f"the lessons are {format_spans(to_spans(lessons))}",
            fix="list them with their titles: shoal learn; a page of what was done: shoal learn report",
        )
    return lessons[number]

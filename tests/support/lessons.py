"""Lessons with recorded commands: the check of a lesson is judged and starts no process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from shoal.tools.learn.experiment import Experiment, FinishedCommand, Result, Value
from shoal.tools.learn.judge import LessonVerdict, judge, verdict_of
from shoal.tools.learn.lesson import LESSONS, LessonFolder, read_lesson

# What a command leaves: the document that it prints, a function that also writes files into the folder, or all of it
# for a command that fails.
Recorded: TypeAlias = Mapping[str, Any] | str | Callable[[Path], Mapping[str, Any]] | FinishedCommand


@contextlib.contextmanager
def silent(_: str) -> Iterator[Callable[[str], None]]:
    yield lambda _: None


class RecordedExperiment(Experiment):
    """Gives recorded output for a command: that of the longest text which the command contains."""

    def __init__(self, folder: Path, recorded: Mapping[str, Recorded], answers: Mapping[str, Value]) -> None:
        super().__init__(folder, folder.parent, answers, silent)
        self._recorded = recorded

    def __enter__(self) -> RecordedExperiment:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def execute(self, shown: str, words: Sequence[str], update: Callable[[str], None]) -> FinishedCommand:
        known = [text for text in self._recorded if text in shown]
        assert known, f"nothing is recorded for: {shown}"
        recorded = self._recorded[max(known, key=len)]
        if isinstance(recorded, FinishedCommand):
            return recorded
        out = recorded if isinstance(recorded, str) else recorded(self.folder) if callable(recorded) else recorded
        return FinishedCommand(shown, 0, out if isinstance(out, str) else json.dumps(out), "", 1.0)


def shoal_lesson(number: int) -> LessonFolder:
    [path] = LESSONS.glob(f"lesson_{number:02}_*")
    return read_lesson(path)


def play_recorded(
    number: int, folder: Path, recorded: Mapping[str, Recorded], answers: Mapping[str, Value], cores: float = 0.0
) -> tuple[LessonVerdict, Result, dict[str, str]]:
    """Return the verdict, the result, and the judgement of each prediction and check."""
    lesson = shoal_lesson(number)
    with RecordedExperiment(folder / "try-1", recorded, answers) as experiment:
        result = lesson.load_check()(experiment)
    experiment.note_load(cores)
    predictions, checks = judge(lesson.lesson, result, experiment)
    judgements = {one.name: str(one.judgement) for one in predictions}
    judgements |= {one.text: str(one.judgement) for one in checks}
    return verdict_of([*predictions, *checks]), result, judgements


def write_events(run: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Write the events of ranks as a run folder has them."""
    (run / "events").mkdir(parents=True)
    (run / "config.toml").write_text("")
    for event in events:
        with (run / "events" / f"rank-{event['rank']}.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1.0, **event}) + "\n")

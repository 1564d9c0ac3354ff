"""What happened in a run: marks on the time line of the live page, the newest of each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from shoal.events import Event
from shoal.records.rank_log import as_float
from shoal.terminal import printable_line

_MOST_MARKS = 200  # of one kind
_LONGEST_TEXT = 500


@dataclass
class Mark:
    """Something that happened."""

    number: int
    kind: str
    time: float
    step: int | None
    text: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.number, "kind": self.kind, "time": self.time, "step": self.step, "text": self.text}


class TimeLine:
    """The marks of a run, and those that changed since a viewer was last sent them."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, object], Mark] = {}
        self._kept: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of all marks by kind, also those that are no longer kept
        self._fresh: dict[int, Mark] = {}

    def add(self, kind: str, key: object, event: Event, text: str, step: int | None, keep: bool = False) -> None:
        """Add a mark; one that is there already gets the new text, unless `keep`. All ranks record the same things."""
        known = self._marks.get((kind, key))
        text = printable_line(text, _LONGEST_TEXT)
        if known is not None:
            if keep or known.text == text:
                return
            known.text, known.step = text, known.step if step is None else step
            self._fresh[known.number] = known
            return
        self._kept[kind] += 1
        self.counts[kind] += 1
        mark = Mark(self.counts.total(), kind, as_float(event.get("time"), 0.0), step, text)
        self._marks[kind, key] = self._fresh[mark.number] = mark
        if self._kept[kind] > _MOST_MARKS:
            oldest = next(name for name in self._marks if name[0] == kind)
            self._fresh.pop(self._marks.pop(oldest).number, None)
            self._kept[kind] -= 1

    def place(self, kind: str, key: object, step: int) -> None:
        """Set the step of a mark that was added without one."""
        mark = self._marks.get((kind, key))
        if mark is not None and mark.step is None:
            mark.step = step
            self._fresh[mark.number] = mark

    def has_text(self, text: str) -> bool:
        return any(mark.text == text for mark in self._marks.values())

    def everything(self) -> list[dict[str, Any]]:
        return [mark.as_json() for mark in self._marks.values()]

    def take(self) -> list[dict[str, Any]]:
        """Return the marks that changed since the last call."""
        fresh = [mark.as_json() for mark in self._fresh.values()]
        self._fresh.clear()
        return fresh

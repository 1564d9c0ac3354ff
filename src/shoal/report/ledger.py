"""Was every sample used exactly once? The answer from `commits.jsonl`, the data ledger.

A record says that step `s` took the global positions `[first, end)` and brought the state from `s-1` to `s`.

A step may be recorded again: after a resume, the steps since the checkpoint are done anew. Such a *redo* is no error.
It starts at the position where the step started before, because the cursor belongs to the state that the run went back
to, and it supersedes the earlier record of its step and of every later one, whose updates were thrown away with their
state. A step that is recorded again from another position is a *double*: the run went back, but its cursor did not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, computed_field

from shoal.events import Event
from shoal.report.ranklog import is_step

Range = tuple[int, int]


class LedgerReport(BaseModel):
    """`gaps` were skipped, `overlaps` were used by more than one step; both are `[first, end)` of global positions."""

    steps: int
    samples: int
    gaps: list[Range]
    overlaps: list[Range]
    doubles: list[int]
    redone: int
    unreadable: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        return not (self.gaps or self.overlaps or self.doubles or self.unreadable)


@dataclass
class _Ledger:
    """The records that stand, by step."""

    ranges: dict[int, Range] = field(default_factory=dict)
    last: int = -1
    doubles: set[int] = field(default_factory=set)
    redone: int = 0
    unreadable: int = 0

    def add(self, record: Event) -> None:
        step, samples = record.get("step"), _range(record.get("samples"))
        if not is_step(step) or samples is None:
            self.unreadable += 1
            return
        if step <= self.last:
            self._go_back(step, samples[0])
        self.ranges[step] = samples
        self.last = step

    def _go_back(self, step: int, first: int) -> None:
        if step in self.ranges and self.ranges[step][0] != first:
            self.doubles.add(step)
        kept = {earlier: samples for earlier, samples in self.ranges.items() if earlier < step}
        self.redone += len(self.ranges) - len(kept)
        self.ranges = kept


def check_ledger(commits: Iterable[Event]) -> LedgerReport:
    """An empty ledger is in order: nothing was used, nothing twice."""
    ledger = _Ledger()
    for record in commits:
        ledger.add(record)
    gaps, overlaps = find_gaps_and_overlaps(ledger.ranges.values())
    return LedgerReport(
        steps=len(ledger.ranges),
        samples=sum(end - first for first, end in ledger.ranges.values()),
        gaps=gaps,
        overlaps=overlaps,
        doubles=sorted(ledger.doubles),
        redone=ledger.redone,
        unreadable=ledger.unreadable,
    )


def find_gaps_and_overlaps(ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """What lies between the ranges, counted from position 0, and what more than one of them holds."""
    gaps: list[Range] = []
    overlaps: list[Range] = []
    cursor = 0
    for first, end in sorted(ranges):
        if first > cursor:
            gaps.append((cursor, first))
        elif first < min(cursor, end):
            overlaps.append((first, min(cursor, end)))
        cursor = max(cursor, end)
    return gaps, overlaps


def _range(samples: Any) -> Range | None:
    if not (isinstance(samples, list) and len(samples) == 2 and all(is_step(position) for position in samples)):
        return None
    first, end = samples
    return (first, end) if first <= end else None

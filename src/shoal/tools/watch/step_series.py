"""Steps of a run in bounded memory: averages over ranges of steps, and the newest steps one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.control.membership.types import NEVER, Ballot
from shoal.events import PHASES, Event
from shoal.terminal import printable_line

# The steps that "now" means.
_NOW_STEPS = 20
_LONGEST_NAME = 80
_LARGEST = 1e300

# Columns of a range of steps; all are means except the first.
ROW_FIELDS = ("bucket", "time", "step_s", "compute_s", "exposed_s", "wait_s", "amount", "loss")
# Columns of a single step.
RECENT_FIELDS = (
    "step", "time", "step_s", *(f"{phase}_s" for phase in PHASES), "allreduce_s", "hidden_s", "loss", "amount",
    "grad_norm", "wire_bytes",
)  # fmt: skip
LOSS = RECENT_FIELDS.index("loss")
STEP_S, EXPOSED, WAIT = (RECENT_FIELDS.index(name) for name in ("step_s", "exposed_s", "wait_s"))

Row = list[float | None]


class StepSeries:
    """Means over equal ranges of steps. A row is the number of the range, a count, and a sum of each column."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.rows: list[list[float]] = []
        self._changed: float | None = None  # the first range that changed since the last `take`

    def add(self, bucket: int, values: Iterable[float]) -> None:
        if not self.rows or self.rows[-1][0] < bucket:
            self.rows.append([bucket, 1, *values])
        else:
            row = self.rows[-1]
            row[1] += 1
            for place, value in enumerate(values, start=2):
                row[place] += value
        self._touch(bucket)

    def correct(self, bucket: int, column: int, difference: float) -> None:
        """Change the sum of a column in one of the newest ranges."""
        for row in reversed(self.rows[-3:]):
            if row[0] == bucket:
                row[column + 2] += difference
                self._touch(bucket)

    def cut(self, bucket: int) -> None:
        """Forget this range and those after it: their steps are done again."""
        while self.rows and self.rows[-1][0] >= bucket:
            self.rows.pop()
        self._touch(bucket)

    def merge_pairs(self) -> None:
        merged: list[list[float]] = []
        for number, *sums in self.rows:
            if merged and merged[-1][0] == number // 2:
                merged[-1][1:] = [a + b for a, b in zip(merged[-1][1:], sums, strict=True)]
            else:
                merged.append([number // 2, *sums])
        self.rows = merged

    def means(self, first: float = -1.0) -> list[Row]:
        """Return the ranges from `first` on as numbers and means."""
        start = len(self.rows)
        while start and self.rows[start - 1][0] >= first:
            start -= 1
        return [[row[0], *(short(value / row[1]) for value in row[2:])] for row in self.rows[start:]]

    def take(self) -> list[Row] | None:
        """Return the ranges that changed since the last call, led by the first; None without any.

        A reader drops its ranges from the first one of these on.
        """
        first, self._changed = self._changed, None
        if first is None:
            return None
        # All were cut off: a range without values cuts them off at the reader too.
        return self.means(first) or [[first, *(None for _ in range(self._columns))]]

    def _touch(self, bucket: float) -> None:
        self._changed = bucket if self._changed is None else min(self._changed, bucket)


@dataclass
class ValueSeries:
    """A value that a program recorded under one name; of several ranks the lowest counts."""

    series: StepSeries = field(default_factory=lambda: StepSeries(1))
    last_step: int = -1
    last_value: float = 0.0
    rank: int = 0

    def add(self, rank: int, step: int, bucket: int, value: float) -> None:
        if step <= self.last_step:
            if rank > self.rank:
                return
            self.series.cut(bucket)
        self.last_step, self.last_value, self.rank = step, value, rank
        self.series.add(bucket, (value,))


@dataclass
class RankState:
    """What one rank has recorded."""

    rank: int
    series: StepSeries = field(default_factory=lambda: StepSeries(len(ROW_FIELDS) - 1))
    recent: deque[Row] = field(default_factory=deque)
    fresh: dict[int, Row] = field(default_factory=dict)  # of `recent`, since the last update
    start: Event = field(default_factory=dict)
    last_step: int = -1
    generation: Ballot = NEVER
    ended: str | None = None
    is_lost: bool = False  # it waits for the next generation
    doing: str = ""

    def add(self, record: Row, values: Iterable[float], bucket: int, most_recent: int) -> None:
        step = int(record[0] or 0)
        if step <= self.last_step:
            self.series.cut(bucket)
            while self.recent and (self.recent[-1][0] or 0) >= step:
                self.recent.pop()
        self.last_step, self.is_lost, self.doing = step, False, ""
        self.series.add(bucket, values)
        self.recent.append(record)
        self.fresh[step] = record
        while len(self.recent) > most_recent:
            self.recent.popleft()
        while len(self.fresh) > most_recent:
            del self.fresh[next(iter(self.fresh))]

    def now(self) -> list[Row]:
        """Return the steps that "now" means."""
        return list(self.recent)[-_NOW_STEPS:]

    @property
    def node(self) -> str:
        return clean_name(self.start.get("node"), "here")


def finite(value: Any) -> float | None:
    """Return the value if it is a number that JSON has. By exact types, as this is called for every field of a step."""
    kind = type(value)
    return value if (kind is float or kind is int) and -_LARGEST < value < _LARGEST else None


def short(value: float) -> float | None:
    """Return seven digits, which keep a step number and milliseconds apart; times of day keep all of theirs."""
    if not math.isfinite(value):
        return None
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")


def clean_name(value: Any, default: str = "") -> str:
    return printable_line(value, _LONGEST_NAME) if isinstance(value, str) else default

"""Steps of a run in bounded memory: averages over ranges of steps, and the newest steps one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
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
LOSS, AMOUNT = RECENT_FIELDS.index("loss"), RECENT_FIELDS.index("amount")
_WIRE = RECENT_FIELDS.index("wire_bytes")
_WORK = tuple(RECENT_FIELDS.index(name) for name in ("data_s", "forward_s", "backward_s"))
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


@dataclass(frozen=True)
class StepMeans:
    """Means over the newest steps of a rank, in seconds."""

    step_s: float
    exposed_s: float
    wait_s: float
    work_s: float  # data, forward and backward: what N ranks divide between them
    sent_bytes_per_s: float | None  # None where no step has recorded what its machine sent

    @property
    def compute_s(self) -> float:
        return max(0.0, self.step_s - self.exposed_s - self.wait_s)


def average_steps(records: list[Row]) -> StepMeans:
    columns = list(zip(*records, strict=True)) or [()] * len(RECENT_FIELDS)

    def mean(column: int) -> float:
        values = [value for value in columns[column] if value is not None]
        return fmean(values) if values else 0.0

    sent = [(wire, step_s) for wire, step_s in zip(columns[_WIRE], columns[STEP_S], strict=True) if wire is not None]
    seconds = sum(step_s or 0.0 for _, step_s in sent)
    return StepMeans(
        step_s=mean(STEP_S),
        exposed_s=mean(EXPOSED),
        wait_s=mean(WAIT),
        work_s=sum(map(mean, _WORK)),
        sent_bytes_per_s=sum(wire for wire, _ in sent) / seconds if seconds else None,
    )


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
    _means: StepMeans | None = None

    def add(self, record: Row, values: Iterable[float], bucket: int, most_recent: int) -> None:
        step = int(record[0] or 0)
        if step <= self.last_step:
            self.series.cut(bucket)
            while self.recent and (self.recent[-1][0] or 0) >= step:
                self.recent.pop()
        self.last_step, self.is_lost, self.doing, self._means = step, False, "", None
        self.series.add(bucket, values)
        self.recent.append(record)
        self.fresh[step] = record
        while len(self.recent) > most_recent:
            self.recent.popleft()
        while len(self.fresh) > most_recent:
            del self.fresh[next(iter(self.fresh))]

    def means(self) -> StepMeans:
        """Return the means over the newest steps; computed once for each step."""
        if self._means is None:
            self._means = average_steps(self.newest(_NOW_STEPS))
        return self._means

    def newest(self, most: int) -> list[Row]:
        return [self.recent[-place] for place in range(min(most, len(self.recent)), 0, -1)]

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
    return _clean_name(value) if isinstance(value, str) else default


# The names of nodes and values are few, and asked for hundreds of times an update.
@lru_cache(maxsize=1000)
def _clean_name(name: str) -> str:
    return printable_line(name, _LONGEST_NAME)

"""Steps of a run in bounded memory: averages over ranges of steps, and the newest steps one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any

from shoal.control.membership.types import NEVER, Ballot
from shoal.event_schema import PHASES, STEP_FIELDS, Event, collective_values
from shoal.records.rank_log import as_float, is_step, split_tail
from shoal.terminal import printable_line
from shoal.tools.watch.time_line import TimeLine

# The steps that "now" means.
_NOW_STEPS = 20
_LONGEST_NAME = 80
_LARGEST = 1e300
# Ranges of steps, over all ranks together and of one rank: a viewer that connects gets all of them.
_MOST_ROWS = 8000
_MOST_BUCKETS = 1000
_FEWEST_BUCKETS = 120
# Steps that are kept one by one, of each rank; all ranks together keep at most `_MOST_RECENT`.
_RECENT_STEPS = 400
_MOST_RECENT = 6400
# Steps of a measured script that may wait for its slowest rank's record: of a live run, and while a long one is read.
_MOST_HELD = 50
_MOST_HELD_BEHIND = 4000
MOST_VALUES = 24  # names of values that a user's program recorded
# Fields of a step that are shown elsewhere, beside those that shoal writes itself.
_NO_VALUES = STEP_FIELDS.union(("tokens", "ready_s", "tail_s"))

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
        """Forget this range and those after it: their steps are repeated."""
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
    exposed_s: float  # NaN where it was not recorded, as is the next one
    wait_s: float
    work_s: float  # data, forward and backward: what N ranks divide between them
    sent_bytes_per_s: float | None  # None where no step has recorded what its machine sent

    @property
    def compute_s(self) -> float:
        return max(0.0, self.step_s - sum(filter(math.isfinite, (self.exposed_s, self.wait_s))))


def average_steps(records: list[Row]) -> StepMeans:
    columns = list(zip(*records, strict=True)) or [()] * len(RECENT_FIELDS)

    def mean(column: int, unknown: float = 0.0) -> float:
        values = [value for value in columns[column] if value is not None]
        return fmean(values) if values else unknown

    sent = [(wire, step_s) for wire, step_s in zip(columns[_WIRE], columns[STEP_S], strict=True) if wire is not None]
    seconds = sum(step_s or 0.0 for _, step_s in sent)
    return StepMeans(
        step_s=mean(STEP_S),
        exposed_s=mean(EXPOSED, math.nan),
        wait_s=mean(WAIT, math.nan),
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

    def restart(self, start: Event) -> None:
        self.start, self.ended, self.doing = start, None, ""
        if start.get("measured"):
            # A script that was started again counts its steps from 1.
            self.last_step = -1
            self.series.cut(0)
            self.recent.clear()

    @property
    def node(self) -> str:
        return clean_name(self.start.get("node"), "here")


class RunSeries:
    """The steps of all ranks and the values of the program, in ranges of one length."""

    def __init__(self, time_line: TimeLine) -> None:
        self.stride = 1  # steps in one range
        self.ranks: dict[int, RankState] = {}
        self.values: dict[str, ValueSeries] = {}
        self.val_loss = ValueSeries()
        self._time_line = time_line
        self._held: dict[int, dict[int, Event]] = {}  # steps of a measured script that not all ranks have recorded
        self._is_rebuilt = True

    def rank(self, number: int) -> RankState:
        if number not in self.ranks:
            self.ranks[number] = RankState(number)
        return self.ranks[number]

    def last_step(self, rank: int) -> int:
        return self.ranks[rank].last_step if rank in self.ranks else -1

    def add_step(self, rank: RankState, event: Event, is_behind: bool) -> None:
        if event.get("ready_s") is None:
            self._record_step(rank, event)
            return
        # A script that is only measured: the wait is known when all ranks have recorded the step.
        step, world_size = event["step"], rank.start.get("world_size", 1)
        held = self._held.setdefault(step, {})
        held[rank.rank] = event
        is_complete = len(held) >= world_size
        if not is_complete and len(self._held) <= (_MOST_HELD_BEHIND if is_behind else _MOST_HELD):
            return
        events = self._held.pop(step if is_complete else min(self._held))
        slowest_s = max(as_float(other.get("ready_s"), 0.0) for other in events.values())
        for number, other in sorted(events.items()):
            ready_s, tail_s = as_float(other.get("ready_s"), 0.0), as_float(other.get("tail_s"), 0.0)
            wait_s, exposed_s = split_tail(ready_s, tail_s, slowest_s)
            self._record_step(self.ranks[number], {**other, "wait_s": wait_s, "exposed_s": exposed_s})

    def _record_step(self, rank: RankState, event: Event) -> None:
        step, step_s = event["step"], float(event["step_s"])
        if not is_step(step):
            return
        amount = event["samples"] if event["tokens"] is None else event["tokens"]
        record = list(map(finite, map(event.get, RECENT_FIELDS)))
        record[AMOUNT] = finite(amount)
        # Without `exposed_s` (--measure off) all of a step counts as compute.
        exposed_s, wait_s = record[EXPOSED] or 0.0, record[WAIT] or 0.0
        loss = record[LOSS]
        if loss is None and isinstance(event["loss"], float) and not math.isfinite(event["loss"]):
            text = f"the loss is {event['loss']} since step {step}"
            self._time_line.add("warning", "not finite", event, text, step)
        values = (
            record[1] or 0.0, step_s, max(0.0, step_s - exposed_s - wait_s), exposed_s, wait_s, record[AMOUNT] or 0.0,
            math.nan if loss is None else loss,
        )  # fmt: skip
        rank.add(record, values, step // self.stride, min(_RECENT_STEPS, _MOST_RECENT // max(1, len(self.ranks))))
        if own_names := event.keys() - _NO_VALUES:
            self.add_values(rank.rank, step, {name: event[name] for name in own_names})
        if event.get("collectives"):
            self.add_values(rank.rank, step, collective_values(event))

    def add_world_loss(self, rank: RankState, event: Event) -> None:
        """Replace the loss of one of the newest steps: its `step` event had only this rank's own loss."""
        step, loss = event.get("step"), finite(event.get("loss"))
        for record in reversed(rank.recent):
            if record[0] == step and loss is not None and isinstance(step, int):
                if (own_loss := record[LOSS]) is not None:
                    rank.series.correct(step // self.stride, len(ROW_FIELDS) - 2, loss - own_loss)
                record[LOSS] = loss
                rank.fresh[step] = record
            if (record[0] or 0) <= as_float(step, math.inf):
                return

    def add_val_loss(self, rank: RankState, event: Event) -> None:
        if math.isfinite(event["val_loss"]):
            self.val_loss.add(rank.rank, event["step"], event["step"] // self.stride, event["val_loss"])

    def add_values(self, rank: int, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if (number := finite(value)) is None:
                continue
            if (series := self.values.get(name)) is None and len(self.values) < MOST_VALUES:
                series = self.values.setdefault(clean_name(name), ValueSeries())
            if series is not None:
                series.add(rank, step, step // self.stride, number)

    def limit_ranges(self) -> None:
        """Double the length of all ranges until a viewer can be sent all of them."""
        newest = max((rank.last_step for rank in self.ranks.values()), default=0)
        newest = max(newest, self.val_loss.last_step, *(value.last_step for value in self.values.values()), 0)
        most = min(_MOST_BUCKETS, max(_FEWEST_BUCKETS, _MOST_ROWS // max(1, len(self.ranks))))
        while newest // self.stride >= most:
            self.stride *= 2
            self._is_rebuilt = True
            ranks = [rank.series for rank in self.ranks.values()]
            for series in (*ranks, self.val_loss.series, *(value.series for value in self.values.values())):
                series.merge_pairs()

    def everything(self, is_behind: bool) -> dict[str, Any]:
        """Return what `take` does for the whole run, for a viewer that connects; it takes nothing."""
        return {
            "row_fields": ROW_FIELDS,
            "recent_fields": RECENT_FIELDS,
            "stride": self.stride,
            "rows": {rank.rank: rank.series.means() for rank in self.ranks.values()},
            "recent": {} if is_behind else {rank.rank: list(rank.recent) for rank in self.ranks.values()},
            "values": {name: value.series.means() for name, value in self.values.items()},
            "val_loss": self.val_loss.series.means(),
        }

    def take(self, is_behind: bool) -> dict[str, Any] | None:
        """Return what changed since the last call; None if a viewer needs everything, as ranges were merged.

        Single steps are sent when the run has been read to its end: the others are the last ones for a moment only.
        """
        ready = [rank for rank in self.ranks.values() if rank.fresh and not is_behind]
        changes: dict[str, Any] = {
            "rows": {rank.rank: rows for rank in self.ranks.values() if (rows := rank.series.take())},
            "recent": {rank.rank: list(rank.fresh.values()) for rank in ready},
            "values": {name: rows for name, value in self.values.items() if (rows := value.series.take())},
            "val_loss": self.val_loss.series.take() or [],
        }
        for rank in ready:
            rank.fresh.clear()
        is_rebuilt, self._is_rebuilt = self._is_rebuilt, False
        return None if is_rebuilt else changes


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

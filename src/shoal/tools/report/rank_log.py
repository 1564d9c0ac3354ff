"""What one rank wrote, column by column.

A long run has millions of steps, so a step is kept as a dozen numbers in flat arrays and never as a dictionary.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from shoal.control.membership.types import NEVER, Ballot
from shoal.errors import DataError
from shoal.events import Event

# SECTION report/ballots
# The names of generations and lineages, as ranks, agents and ledgers write them: 7-2.


_NAME = re.compile(r"(\d{1,15})-(\d{1,9})", re.ASCII)


def read_ballot(value: Any) -> Ballot | None:
    """None for what is no name. A run in which nobody comes or goes writes 0-0, a plain 0, or nothing at all."""
    if value is None or value == 0:
        return NEVER
    match = _NAME.fullmatch(value) if isinstance(value, str) else None
    return Ballot(int(match[1]), int(match[2])) if match else None


# SECTION report/entered
# What a rank says when it enters a generation: its `membership` event.


@dataclass(frozen=True)
class Entered:
    """`ids` are the ranks' own numbers, `step` the last one that the generation's state has behind it. `lost_s` is how
    long this rank did not train for it: until it had stopped, was told, had its group and had the state."""

    rank: int
    time: float
    generation: Ballot
    lineage: Ballot
    ids: tuple[int, ...]
    step: int
    how: str
    lost_s: float

    @property
    def is_first(self) -> bool:
        """The generation is the one that a launch began with."""
        return self.how == "first"


def read_entered(event: Event) -> Entered | None:
    """None for an event that lacks what nothing can be said without."""
    generation, lineage, ids = read_ballot(event.get("generation")), read_ballot(event.get("lineage")), event.get("ids")
    if generation is None or lineage is None or not isinstance(ids, list) or not all(map(_is_id, ids)) or not ids:
        return None
    return Entered(
        rank=event["rank"],
        time=_seconds(event.get("time")),
        generation=generation,
        lineage=lineage,
        ids=tuple(ids),
        step=event["step"] if _is_id(event.get("step")) else 0,
        how=str(event.get("how")),
        lost_s=sum(_seconds(event.get(name)) for name in ("halted_s", "waited_s", "formed_s", "copied_s")),
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

PHASES = ("data", "forward", "backward", "exposed", "wait", "optimizer", "other")
# Of the gradient exchange: how long it was under way, and how much of that lay behind backward. They lie across phases.
OF_EXCHANGE = ("allreduce_s", "hidden_s")
TIMES = ("step_s", *(f"{phase}_s" for phase in PHASES), *OF_EXCHANGE)
# What a `choice` says anew of what a `start` has said.
_OF_EXCHANGES = ("sync", "wire", "grad_bytes", "round_steps", "wire_made_by", "inside", "inside_note")
# `entry` is where in `RankLog.entered` the step's generation is; -1 before any.
COLUMNS = (*TIMES, "loss", "tokens", "lr", "grad_norm", "wire_bytes", "entry")


def _columns() -> dict[str, array[float]]:
    return {name: array("d") for name in COLUMNS}


class Span(NamedTuple):
    """The steps that a rank did in one generation and, unless another rank did, in none after it."""

    entered: Entered
    first: int
    last: int


@dataclass
class RankLog:
    """One rank's events, read in order.

    A resumed run appends to the same file: the last record of a step wins, and what is said about speed is about the
    steps since the last start, because world, threads and machine may have been different before. Of a run whose ranks
    come and go, it is about those steps that `measured_size` ranks did together, where that is set.
    """

    rank: int
    start: Event = field(default_factory=dict)
    shard: Event = field(default_factory=dict)
    started_at: float | None = None
    ran_s: float | None = None
    """From its start to its last event, in all launches together."""
    ended: str | None = None
    end: Event = field(default_factory=dict)
    choice: Event = field(default_factory=dict)
    fault: Event | None = None
    warnings: list[Event] = field(default_factory=list)
    val_loss: dict[int, float] = field(default_factory=dict)
    entered: list[Entered] = field(default_factory=list)
    member_of: Entered | None = None
    measured_size: int | None = None
    _last_time: float | None = None
    _val_entry: dict[int, int] = field(default_factory=dict)
    _row: dict[int, int] = field(default_factory=dict)
    _values: dict[str, array[float]] = field(default_factory=_columns)
    _measured_from: int = 0
    _restarted: bool = True
    _trained_since: bool = False

    def add(self, event: Event) -> None:
        self._count_time(event)
        match event.get("event"):
            case "start":
                self._begin(event)
            case "choice":
                self._change(event)
            case "membership":
                self._enter(event)
            case "shard":
                self.shard = event
            case "step":
                self._add_step(event)
            case "loss":
                self._add_loss(event)
            case "eval":
                self._add_eval(event)
            case "fault":
                self.fault = event
            case "warning":
                self.warnings.append(event)
            case "end":
                self.ended, self.end, self._trained_since = str(event.get("status")), event, True

    def _count_time(self, event: Event) -> None:
        """Between two launches the rank did not run: a `membership` may stand just before the `start` of the next one
        and does not count. A clock that was set back counts nothing."""
        time = as_float(event.get("time"))
        if not np.isfinite(time) or event.get("event") == "membership":
            return
        if event.get("event") == "start" or self._last_time is None:
            self._last_time = time
        self.ran_s = (self.ran_s or 0.0) + max(0.0, time - self._last_time)
        self._last_time = max(time, self._last_time)

    @property
    def steps(self) -> Steps:
        return np.array(sorted(self._row), dtype=np.int64)

    def column(self, name: str) -> Floats:
        """One value a step, in the order of `steps`; NaN where a step did not record it."""
        rows = [self._row[step] for step in sorted(self._row)]
        return np.frombuffer(self._values[name], dtype=np.float64)[rows] if rows else np.empty(0)

    def measured(self) -> Steps:
        """Positions (in `steps`) of the second half of the steps since the last start: the first half warms up."""
        counts = self.steps >= self._measured_from
        if self.measured_size is not None:
            counts &= self.sizes() == self.measured_size
        positions = np.flatnonzero(counts)
        return positions[len(positions) // 2 :]

    def sizes(self) -> Steps:
        """How many ranks did each of `steps` together; 0 where nobody said."""
        known = np.array([*(len(entered.ids) for entered in self.entered), 0], dtype=np.int64)
        return known[self.column("entry").astype(np.int64)]

    def counted(self) -> Steps:
        """Positions of the steps since the last start."""
        return np.flatnonzero(self.steps >= self._measured_from)

    def generations(self) -> list[Entered | None]:
        """The one that did each of `steps`."""
        return [self._entered_at(entry) for entry in self.column("entry").astype(np.int64).tolist()]

    def spans(self) -> tuple[Span, ...]:
        entries, steps = self.column("entry"), self.steps
        done = [(entered, steps[entries == entry]) for entry, entered in enumerate(self.entered)]
        return tuple(Span(entered, int(each[0]), int(each[-1])) for entered, each in done if len(each))

    def entered_at_eval(self, step: int) -> Entered | None:
        return self._entered_at(self._val_entry[step])

    def _entered_at(self, entry: int) -> Entered | None:
        return self.entered[entry] if entry >= 0 else None

    def _enter(self, event: Event) -> None:
        if (entered := read_entered(event)) is not None:
            self.entered.append(entered)
            self.member_of, self._trained_since = entered, False

    def _begin(self, event: Event) -> None:
        self.start, self.ended, self.end, self.fault = event, None, {}, None
        if self.started_at is None and is_number(event.get("time")):
            self.started_at = float(event["time"])
        # A process says in which generation it begins just before or just after that it has started.
        if self._trained_since:
            self.member_of = None
        # The mark is set by the first step to come, so that resuming a finished run, which has no step left to do,
        # does not throw away what was measured.
        self._restarted = True

    def _change(self, event: Event) -> None:
        """How replicas agree from now on. What was measured before is of another kind, and counts as warming up."""
        self.choice = event
        self.start = {**self.start, **{name: event[name] for name in _OF_EXCHANGES if name in event}}
        self._restarted = True

    def _add_step(self, event: Event) -> None:
        step = event.get("step")
        if not is_step(step):
            return
        if self._restarted:
            self._measured_from, self._restarted = step, False
        self._trained_since = True
        row = self._row.setdefault(step, len(self._row))
        entry = len(self.entered) - 1 if self.member_of else -1
        for name, values in self._values.items():
            value = entry if name == "entry" else as_float(event.get(name))
            if row < len(values):
                values[row] = value
            else:
                values.append(value)

    def _add_loss(self, event: Event) -> None:
        """The world's loss of a step that had only its rank's own when it was recorded."""
        step = event.get("step")
        if is_step(step) and step in self._row and is_number(event.get("loss")):
            self._values["loss"][self._row[step]] = float(event["loss"])

    def _add_eval(self, event: Event) -> None:
        if is_step(event.get("step")) and is_number(event.get("val_loss")):
            self.val_loss[event["step"]] = float(event["val_loss"])
            self._val_entry[event["step"]] = len(self.entered) - 1 if self.member_of else -1


def collect(events: Iterable[Event]) -> dict[int, RankLog]:
    """The events of all ranks, in any interleaving, as one log per rank."""
    logs: dict[int, RankLog] = {}
    for event in events:
        rank = event.get("rank")
        if isinstance(rank, int) and not isinstance(rank, bool):
            logs.setdefault(rank, RankLog(rank)).add(event)
    return dict(sorted(logs.items()))


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def as_float(value: Any) -> float:
    return float(value) if is_number(value) else float("nan")


# SECTION report/straggling
# How unevenly a run's ranks took their steps: the raw material for simulated stragglers.


def own_factors(events: Iterable[Event]) -> Floats:
    """Each rank's own time of each measured step, divided by that rank's median.

    Its own, without the wait: all ranks of a step end together, so whole steps say only how slow the slowest was. By
    its own median: a machine that is always slower is no straggler but part of the step time.
    """
    logs = [log for log in collect(events).values() if len(log.steps)]
    if not logs:
        raise DataError(
            "no rank of this run has recorded a step",
            why="stragglers are fitted to the step times in its events",
            fix="use a run that trained, or state the spread: --straggler lognormal:0.05",
        )
    return np.concatenate([_factors(log, alone=len(logs) == 1) for log in logs])


def _factors(log: RankLog, alone: bool) -> Floats:
    measured = log.measured()
    waited_s = log.column("wait_s")[measured]
    if alone:
        waited_s = np.nan_to_num(waited_s)
    own_s = log.column("step_s")[measured] - waited_s
    own_s = own_s[np.isfinite(own_s) & (own_s > 0)]
    if not len(own_s):
        raise DataError(
            f"rank {log.rank} has not recorded how long it waited for the others",
            why="without it a rank's own time cannot be told from that of the slowest one; --measure off leaves it out",
            fix="train again with --measure hook, or state the spread: --straggler lognormal:0.05",
        )
    return own_s / np.median(own_s)

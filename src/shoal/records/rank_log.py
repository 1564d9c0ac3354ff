"""Read one rank's events into columns.

A long run has millions of steps. So a step is kept as a dozen numbers in flat arrays and never as a dictionary.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from shoal.config.load import load_settings
from shoal.config.schema import Config
from shoal.control.membership.types import NEVER, Ballot
from shoal.errors import DataError, ShoalError
from shoal.event_schema import COLLECTIVE_FIELDS, LOG_FIELDS, STEP_TIMES, Event
from shoal.run_folder import RunFolder

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

# Fields of a `start` event that a later `choice` event replaces.
_SETUP_FIELDS = ("threads", "cpus", "inside")
_SYNC_FIELDS = ("sync", "wire", "grad_bytes", "round_steps", "wire_made_by", "inside", "inside_note")
# A measured script: from the end of an exchange until this rank's last gradient is ready, and from then to its end.
_MEASURED = ("ready_s", "tail_s")
# `entry` is the index in `StepTable.entered` of the step's generation; -1 before any.
_COLUMNS = (*STEP_TIMES, "loss", "tokens", "samples", "lr", "grad_norm", "wire_bytes", "entry", *_MEASURED)

# A machine that joined may write anything into its own rank's file.
MOST_LOGGED = 1000

_BALLOT = re.compile(r"(\d{1,15})-(\d{1,9})", re.ASCII)


def read_ballot(value: Any) -> Ballot | None:
    """Parse the name of a generation or lineage, such as `7-2`; return None for any other text.

    A run without membership changes writes 0-0, a plain 0, or nothing at all.
    """
    if value is None or value == 0:
        return NEVER
    match = _BALLOT.fullmatch(value) if isinstance(value, str) else None
    return Ballot(int(match[1]), int(match[2])) if match else None


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def as_float(value: Any, default: float = float("nan")) -> float:
    return float(value) if is_number(value) else default


def logged_values(event: Event) -> dict[str, float]:
    """Return the values of a `log` event, which a user's program named."""
    return {name: float(value) for name, value in event.items() if name not in LOG_FIELDS and is_number(value)}


@dataclass(frozen=True)
class Entered:
    """A rank's `membership` event: the rank entered a generation."""

    rank: int
    time: float
    generation: Ballot
    lineage: Ballot
    ids: tuple[int, ...]  # permanent ids of the ranks in the generation
    step: int  # the last step that the generation's state contains
    how: str
    lost_s: float  # time without training: stop, wait for the decision, form the group, copy the state

    @property
    def is_first(self) -> bool:
        """Whether a launch began with this generation."""
        return self.how == "first"


def read_entered(event: Event) -> Entered | None:
    """Parse a `membership` event; return None where generation, lineage or members are unusable."""
    generation, lineage, ids = read_ballot(event.get("generation")), read_ballot(event.get("lineage")), event.get("ids")
    if generation is None or lineage is None or not isinstance(ids, list) or not all(map(is_step, ids)) or not ids:
        return None
    return Entered(
        rank=event["rank"],
        time=as_float(event.get("time"), 0.0),
        generation=generation,
        lineage=lineage,
        ids=tuple(ids),
        step=event["step"] if is_step(event.get("step")) else 0,
        how=str(event.get("how")),
        lost_s=sum(as_float(event.get(name), 0.0) for name in ("halted_s", "waited_s", "formed_s", "copied_s")),
    )


class Span(NamedTuple):
    """The steps that a rank did in one generation and did not repeat in a later one."""

    entered: Entered
    first: int
    last: int


class Calls(NamedTuple):
    """Collectives of one kind that a rank has called from Python in a step."""

    calls: float
    bytes: float
    waited_s: float


@dataclass
class StepTable:
    """The steps of one rank: a row of numbers each. The last record of a step wins.

    Speed figures use only the steps since the last start, because world size, threads and machine may have differed
    before. If ranks joined or left and `measured_size` is set, they use only the steps that this number of ranks did
    together.
    """

    entered: list[Entered]  # the rank's generations; shared with its `RankLog`
    measured_size: int | None = None
    collectives: dict[str, dict[int, Calls]] = field(default_factory=dict)  # of a measured script, by kind and step
    _row: dict[int, int] = field(default_factory=dict)  # row of a step in _values
    _values: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _COLUMNS})
    _sorted_rows: Steps = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # rows in the order of steps
    _measured_from: int = 0
    _is_restarted: bool = True

    def __len__(self) -> int:
        return len(self._row)

    @property
    def numbers(self) -> Steps:
        """The numbers of the steps, in order."""
        return np.array(sorted(self._row), dtype=np.int64)

    def column(self, name: str) -> Floats:
        """Return one value per step, in their order; NaN where a step did not record it."""
        if len(self._sorted_rows) != len(self._row):
            self._sorted_rows = np.array([self._row[step] for step in sorted(self._row)], dtype=np.int64)
        return np.frombuffer(self._values[name], dtype=np.float64)[self._sorted_rows]

    def measured(self) -> Steps:
        """Return the positions of the second half of the steps since the last start. The first half is warm-up."""
        counts = self.numbers >= self._measured_from
        if self.measured_size is not None:
            counts &= self.sizes() == self.measured_size
        positions = np.flatnonzero(counts)
        return positions[len(positions) // 2 :]

    def sizes(self) -> Steps:
        """Return the world size of each step; 0 where it is unknown."""
        known = np.array([*(len(entered.ids) for entered in self.entered), 0], dtype=np.int64)
        return known[self.column("entry").astype(np.int64)]

    def counted(self) -> Steps:
        """Return the positions of the steps since the last start."""
        return np.flatnonzero(self.numbers >= self._measured_from)

    def generations(self) -> list[Entered | None]:
        """Return the generation that did each step."""
        entries = self.column("entry").astype(np.int64).tolist()
        return [self.entered[entry] if entry >= 0 else None for entry in entries]

    def spans(self) -> tuple[Span, ...]:
        entries, steps = self.column("entry"), self.numbers
        done = [(entered, steps[entries == entry]) for entry, entered in enumerate(self.entered)]
        return tuple(Span(entered, int(numbers[0]), int(numbers[-1])) for entered, numbers in done if len(numbers))

    def restart(self, forget: bool = False) -> None:
        """Count as warm-up what was recorded so far; `forget` it if the steps are counted from 1 again.

        The next step sets where measuring begins, not this call: resuming a finished run, which has no step left to do,
        must keep what was measured.
        """
        self._is_restarted = True
        if forget:
            self._row.clear()
            self.collectives.clear()
            self._sorted_rows = np.empty(0, dtype=np.int64)
            self._values = {name: array("d") for name in _COLUMNS}

    def add(self, step: int, event: Event, entry: int) -> None:
        """Add a step that was done in generation `entry` of `entered`; -1 before any."""
        if self._is_restarted:
            self._measured_from, self._is_restarted = step, False
        row = self._row.setdefault(step, len(self._row))
        is_new = row == len(self._values["entry"])
        record = {**event, "entry": float(entry)}
        for name, values in self._values.items():
            value = record.get(name)
            if not isinstance(value, float):
                value = as_float(value)
            if is_new:
                values.append(value)
            else:
                values[row] = value
        for kind, calls in (event.get("collectives") or {}).items():
            if kind in self.collectives or len(self.collectives) < MOST_LOGGED:
                self.collectives.setdefault(kind, {})[step] = Calls(*(calls[name] for name in COLLECTIVE_FIELDS))

    def correct(self, step: int, **values: float) -> None:
        """Replace values of a step; nothing if there is no such step."""
        if step in self._row:
            for name, value in values.items():
                self._values[name][self._row[step]] = value


@dataclass
class LaunchClock:
    """When a rank started, and how long it ran over all of its launches."""

    started_at: float | None = None
    ran_s: float | None = None
    _last_time: float | None = None

    def add(self, event: Event) -> None:
        """Add the time since the previous event.

        The time between two launches does not count. A `membership` event may come just before the `start` of the next
        launch, so it is ignored. A clock that was set back adds nothing.
        """
        time = as_float(event.get("time"))
        if not math.isfinite(time) or event.get("event") == "membership":
            return
        if event.get("event") == "start":
            self._last_time = time
            self.started_at = time if self.started_at is None else self.started_at
        elif self._last_time is None:
            self._last_time = time
        self.ran_s = (self.ran_s or 0.0) + max(0.0, time - self._last_time)
        self._last_time = max(time, self._last_time)


class Recorded(NamedTuple):
    """A value, and the generation in which the rank recorded it."""

    value: float
    entered: Entered | None


@dataclass
class RankLog:
    """One rank's events, read in order. A resumed run appends to the same file."""

    rank: int
    start: Event = field(default_factory=dict)
    shard: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    choice: Event = field(default_factory=dict)
    fault: Event | None = None
    warnings: list[Event] = field(default_factory=list)
    clock: LaunchClock = field(default_factory=LaunchClock)
    val_loss: dict[int, Recorded] = field(default_factory=dict)
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # `session.log`: values by name and step
    logged_in: dict[int, Entered | None] = field(default_factory=dict)  # the generation of each step of `logged`
    entered: list[Entered] = field(default_factory=list)
    member_of: Entered | None = None
    steps: StepTable = field(init=False)
    _has_trained: bool = False  # since the last start

    def __post_init__(self) -> None:
        self.steps = StepTable(self.entered)

    @property
    def ended(self) -> str | None:
        """How the last launch ended; None if it has not."""
        return str(self.end.get("status")) if self.end else None

    def add(self, event: Event) -> None:
        self.clock.add(event)
        match event.get("event"):
            case "start":
                self._add_start(event)
            case "choice":
                # Steps measured before used another sync method and count as warm-up.
                self.choice = event
                self.steps.restart()
                self._update_start(event, _SYNC_FIELDS)
            case "trial":
                self._update_start(event, _SETUP_FIELDS)
            case "membership":
                if (entered := read_entered(event)) is not None:
                    self.entered.append(entered)
                    self.member_of, self._has_trained = entered, False
            case "shard":
                self.shard = event
            case "step":
                if is_step(step := event.get("step")):
                    self._has_trained = True
                    self.steps.add(step, event, len(self.entered) - 1 if self.member_of else -1)
            case "loss":
                # The mean over all ranks; the `step` event had only this rank's own loss.
                if is_step(step := event.get("step")) and is_number(event.get("loss")):
                    self.steps.correct(step, loss=float(event["loss"]))
            case "eval":
                if is_step(step := event.get("step")) and is_number(event.get("val_loss")):
                    self.val_loss[step] = Recorded(float(event["val_loss"]), self.member_of)
            case "log":
                if is_step(step := event.get("step")):
                    self._add_logged(step, event)
            case "fault":
                self.fault = event
            case "warning":
                self.warnings.append(event)
            case "end":
                self.end, self._has_trained = event, True

    def _add_start(self, event: Event) -> None:
        self.start, self.end, self.fault = event, {}, None
        # A process records its first generation just before or just after its start.
        if self._has_trained:
            self.member_of = None
        # A script that was started again counts its steps from 1.
        self.steps.restart(forget=bool(event.get("measured")))

    def _update_start(self, event: Event, names: tuple[str, ...]) -> None:
        self.start = {**self.start, **{name: event[name] for name in names if name in event}}

    def _add_logged(self, step: int, event: Event) -> None:
        self.logged_in[step] = self.member_of
        for name, value in logged_values(event).items():
            if name in self.logged or len(self.logged) < MOST_LOGGED:
                self.logged.setdefault(name, {})[step] = value


def read_rank_logs(events: Iterable[Event]) -> dict[int, RankLog]:
    """Sort the events of all ranks, in any interleaving, into one log per rank."""
    logs: dict[int, RankLog] = {}
    for event in events:
        rank = event.get("rank")
        if isinstance(rank, int) and not isinstance(rank, bool):
            if rank not in logs:
                logs[rank] = RankLog(rank)
            logs[rank].add(event)
    _split_tails(logs)
    return dict(sorted(logs.items()))


def split_tail(ready_s: float, tail_s: float, slowest_s: float) -> tuple[float, float]:
    """Divide the end of a measured script's exchange into waiting for the slowest rank and communication.

    `ready_s` is how long this rank took since the end of the last exchange, when all ranks were at the same point, and
    `slowest_s` how long the slowest one took.
    """
    wait_s = min(tail_s, slowest_s - ready_s)
    return wait_s, tail_s - wait_s


def _split_tails(logs: dict[int, RankLog]) -> None:
    """Divide the end of each exchange of a measured script, where all of its ranks have recorded it.

    Ranks exchange no times while they run. At the end of an exchange all are at the same point, so the durations until
    each has its gradients ready can be compared afterwards, without comparing clocks.
    """
    measured = [log for _, log in sorted(logs.items()) if log.start.get("measured")]
    size = measured[0].start["world_size"] if measured else 0
    # A rank of an earlier attempt may have left its events behind.
    measured = [log for log in measured if log.start["world_size"] == size]
    times: dict[int, list[tuple[StepTable, float, float]]] = {}
    for log in measured:
        columns = (log.steps.numbers, log.steps.column("ready_s"), log.steps.column("tail_s"))
        for step, ready_s, tail_s in zip(*(column.tolist() for column in columns), strict=True):
            if math.isfinite(ready_s):
                times.setdefault(step, []).append((log.steps, ready_s, tail_s))
    for step, of_ranks in times.items():
        if len(of_ranks) == size:
            slowest_s = max(ready_s for _, ready_s, _ in of_ranks)
            for table, ready_s, tail_s in of_ranks:
                wait_s, exposed_s = split_tail(ready_s, tail_s, slowest_s)
                table.correct(step, wait_s=wait_s, exposed_s=exposed_s)


def no_steps_error(run: RunFolder, needs: str) -> DataError:
    """Return the error for a run without steps; `needs` tells what the steps are needed for."""
    folder = shlex.quote(str(run.path))
    why, fix = "a script without a session records none", "record them: shoal run --measure SCRIPT"
    with contextlib.suppress(ShoalError):
        # A run of shoal's GPT always records its steps.
        if isinstance(load_settings(run.config), Config):
            is_going_on = run.is_held()
            why = "this training has done none yet" if is_going_on else "this training ended before its first"
            fix = f"watch it: shoal attach {folder}" if is_going_on else f"see why: shoal logs {folder}"
    return DataError(f"no rank of {run.path} has recorded a step", why=f"{needs}; {why}", fix=fix)


def step_time_factors(events: Iterable[Event]) -> Floats:
    """Return each rank's own time of each measured step, divided by that rank's median: input for simulated stragglers.

    The own time excludes the wait. All ranks end a step together, so whole step times only show how slow the slowest
    rank was. The division by the rank's own median keeps a machine that is always slower from counting as a straggler.
    """
    logs = [log for log in read_rank_logs(events).values() if len(log.steps)]
    if not logs:
        raise DataError(
            "no rank of this run has recorded a step",
            why="stragglers are fitted to the step times in its events",
            fix='use a run that trained, or state the spread: straggler = "lognormal:0.05"',
        )
    return np.concatenate([_rank_factors(log, is_alone=len(logs) == 1) for log in logs])


def _rank_factors(log: RankLog, is_alone: bool) -> Floats:
    measured = log.steps.measured()
    waited_s = log.steps.column("wait_s")[measured]
    if is_alone:
        waited_s = np.nan_to_num(waited_s)
    own_s = log.steps.column("step_s")[measured] - waited_s
    own_s = own_s[np.isfinite(own_s) & (own_s > 0)]
    if not len(own_s):
        raise DataError(
            f"rank {log.rank} has not recorded how long it waited for the others",
            why="--measure off omits it, and then own time and wait for the slowest rank cannot be separated",
            fix='train again with --measure hook, or state the spread: straggler = "lognormal:0.05"',
        )
    return own_s / np.median(own_s)

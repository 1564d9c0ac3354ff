"""Export what a run has recorded: CSV, JSON lines, TensorBoard event files, Weights & Biases.

Every event file is read twice and never kept. The first reading finds which records stand: a run that went back to a
checkpoint did some steps again. The second yields the rows, all ranks of a step together. So memory does not grow with
the length of a run.
"""

from __future__ import annotations

import contextlib
import csv
import heapq
import json
import math
import secrets
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeGuard

from shoal.control.membership.types import NEVER
from shoal.errors import ShoalError
from shoal.event_schema import LOG_FIELDS, STEP_FIELDS, STEP_TIMES, collective_values
from shoal.events import Event, EventTail
from shoal.records.documents import read_document
from shoal.records.history import FinalLineage
from shoal.records.rank_log import (
    MOST_LOGGED,
    Entered,
    RankLog,
    as_float,
    is_number,
    is_step,
    no_steps_error,
    split_tail,
)
from shoal.run_folder import RunFolder
from shoal.tensorboard import ScalarWriter, event_file_name
from shoal.terminal import printable_line
from shoal.units import SAMPLES, TOKENS, Unit
from shoal.wandb_client import WandbLike, import_wandb

# Columns of every export, in this order. Values that the user's program recorded follow, by name.
PLACE_COLUMNS = ("step", "rank", "node", "time", "generation", "world_size")
RANK_COLUMNS = (*STEP_TIMES, "wire_bytes")
WORLD_COLUMNS = ("loss", "val_loss", "tokens", "samples", "lr", "grad_norm")
COLUMNS = (*PLACE_COLUMNS, *WORLD_COLUMNS, *RANK_COLUMNS)

_FROM_STEP = {*WORLD_COLUMNS, *RANK_COLUMNS} - {"val_loss"}
# Fields of a `step` event that are not values of the user's program.
_NO_VALUES = STEP_FIELDS.union(_FROM_STEP, ("ready_s", "tail_s"))
# Rows of a rank that wait for a late `loss` event: it may come a round of an outer mode later.
_WINDOW = 1000
_POLL_BYTES = 1 << 18
_LONGEST_NAME = 80
_LARGEST_INT = 2**63


@dataclass(slots=True)
class StepRow:
    """What one rank has recorded of one step."""

    step: int
    rank: int
    time: float
    start: Event  # of the launch that did the step
    entered: Entered | None
    values: dict[str, float] = field(default_factory=dict)  # by column; what was not recorded is missing
    ready_s: float = math.nan
    tail_s: float = math.nan

    @property
    def world_size(self) -> int:
        size = self.start.get("world_size")
        return len(self.entered.ids) if self.entered else size if is_step(size) else 1

    def place(self) -> dict[str, Any]:
        node = self.start.get("node")
        return {
            "step": self.step,
            "rank": self.rank,
            "node": printable_line(node, _LONGEST_NAME) if isinstance(node, str) else "",
            "time": self.time,
            "generation": str(self.entered.generation if self.entered else NEVER),
            "world_size": self.world_size,
        }


class _RankReader:
    """Follows a rank's events: its launch, its generation, and the stretch of ascending steps that it is in."""

    def __init__(self, rank: int) -> None:
        # Gets the events that describe the launch, and the first step after each.
        self.log = RankLog(rank)
        self.stretches: list[int] = []  # the first step of each stretch after the first one
        self._last_step = -1
        self._needs_step = True

    def follow(self, event: Event) -> None:
        if event["event"] in ("start", "membership"):
            self.log.add(event)
            self._needs_step = True
        elif event["event"] == "step" and is_step(event["step"]):
            if event["step"] <= self._last_step:
                self.stretches.append(event["step"])
            self._last_step = event["step"]
            if self._needs_step:
                self.log.add(event)
                self._needs_step = False


class RunMetrics:
    """The steps of a run, with all that its ranks and the user's program have recorded of them."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.unit: Unit = SAMPLES
        self.unreadable = 0  # lines that were skipped
        self._events: dict[int, int] = {}  # how many events of each rank are read: a live run writes on
        self._last_standing: dict[int, list[int]] = {}  # of each rank and stretch: the last step not repeated
        self._names: dict[str, str] = {}  # columns of the user's values, by the names in the events
        logs: dict[int, RankLog] = {}
        for rank, path in run.event_files().items():
            logs[rank] = self._scan(rank, path)
        self._final = FinalLineage(logs)
        if not any(len(log.steps) for log in logs.values()):
            raise no_steps_error(run, "an export has the steps in the events of a run")

    @property
    def user_columns(self) -> list[str]:
        return sorted(set(self._names.values()))

    def steps(self) -> Iterator[list[StepRow]]:
        """Yield the rows of each step, by rank; steps come in order."""
        streams = [self._read(rank) for rank in self._events]
        for _, rows in groupby(heapq.merge(*streams, key=attrgetter("step", "rank")), attrgetter("step")):
            standing = _without_superseded(list(rows))
            _divide_exchange(standing)
            yield standing

    def _scan(self, rank: int, path: Path) -> RankLog:
        reader, tail, count = _RankReader(rank), EventTail(path), 0
        for event in _poll_all(tail):
            count += 1
            if event["rank"] != rank:
                # A machine that joined may write anything into its own rank's file.
                self.unreadable += 1
                continue
            reader.follow(event)
            if event["event"] == "step" and event["tokens"] is not None:
                self.unit = TOKENS
            for name in _user_values(event):
                if name not in self._names and len(self._names) < MOST_LOGGED:
                    self._names[name] = _column_name(name)
        self._events[rank] = count
        self.unreadable += tail.unreadable
        last, limit = list[int](), _LARGEST_INT
        for first in reversed(reader.stretches):
            last.append(limit)
            limit = min(limit, first - 1)
        self._last_standing[rank] = [*reversed([*last, limit])]
        return reader.log

    def _read(self, rank: int) -> Iterator[StepRow]:
        """Yield a rank's rows in order."""
        reader, rows, newest = _RankReader(rank), dict[int, StepRow](), -1
        for event in islice(_poll_all(EventTail(self.run.events(rank))), self._events[rank]):
            if event["rank"] != rank:
                continue
            reader.follow(event)
            kind, step = event["event"], event.get("step")
            if (
                kind not in ("step", "loss", "eval", "log")
                or not is_step(step)
                or (step <= newest and step not in rows)
            ):
                continue
            entered, last = reader.log.member_of, self._last_standing[rank][len(reader.stretches)]
            if kind == "loss":
                # The mean over all ranks; the `step` event had only this rank's own loss.
                if step in rows and _is_value(event.get("loss")):
                    rows[step].values["loss"] = event["loss"]
            elif step <= last and self._final.holds(entered, step):
                if step not in rows or kind == "step":
                    rows[step] = StepRow(step, rank, as_float(event["time"], 0.0), reader.log.start, entered)
                    newest = max(newest, step)
                self._fill(rows[step], event)
            if len(rows) > _WINDOW:
                yield rows.pop(next(iter(rows)))
        yield from rows.values()

    def _fill(self, row: StepRow, event: Event) -> None:
        if event["event"] == "step":
            row.values |= {name: value for name in _FROM_STEP if _is_value(value := event.get(name))}
            row.ready_s, row.tail_s = (
                as_float(value) if _is_value(value := event.get(name)) else math.nan for name in ("ready_s", "tail_s")
            )
        elif event["event"] == "eval":
            row.values["val_loss"] = event["val_loss"]
        row.values |= {self._names[name]: value for name, value in _user_values(event).items() if name in self._names}


def _poll_all(tail: EventTail) -> Iterator[Event]:
    """Yield all events of a file that have their newline, in pieces that bound the memory."""
    while True:
        offset = tail.offset
        yield from tail.poll(_POLL_BYTES)
        if tail.offset == offset:
            return


def _user_values(event: Event) -> dict[str, float]:
    """Return the numbers of an event that the user's program named."""
    known = {"step": _NO_VALUES, "log": LOG_FIELDS}.get(event["event"])
    if known is None:
        return {}
    own = collective_values(event) if event["event"] == "step" else {}
    return own | {name: value for name, value in event.items() if name not in known and _is_value(value)}


def _is_value(value: Any) -> TypeGuard[float]:
    """Return whether this is a number, also NaN, but none too large to be converted."""
    return isinstance(value, float) or (is_number(value) and abs(value) < _LARGEST_INT)


def _column_name(name: str) -> str:
    """Return the column of a user's value: its own name, unless that is a column of shoal's."""
    name = printable_line(name, _LONGEST_NAME)
    return f"user.{name}" if name in COLUMNS else name


def _without_superseded(rows: list[StepRow]) -> list[StepRow]:
    """Return the rows of the last generation, or launch, that did this step.

    A rank that left has rows of steps that the others repeated without it.
    """
    generation = max(row.entered.generation if row.entered else NEVER for row in rows)
    if generation != NEVER:
        return [row for row in rows if row.entered and row.entered.generation == generation]
    # Without membership ranks are numbered from 0: a run that was resumed on fewer has left rows of the others.
    newest = max(rows, key=lambda row: as_float(row.start.get("time"), 0.0))
    return [row for row in rows if row.rank < newest.world_size] or rows


def _divide_exchange(rows: list[StepRow]) -> None:
    if len(rows) < rows[0].world_size or not all(math.isfinite(row.ready_s) for row in rows):
        return
    slowest_s = max(row.ready_s for row in rows)
    for row in rows:
        row.values["wait_s"], row.values["exposed_s"] = split_tail(row.ready_s, row.tail_s, slowest_s)


def world_values(rows: list[StepRow], unit: Unit, user_columns: list[str]) -> dict[str, float]:
    """Return the values of a step for the whole run: loss, speed, and the user's values, of the lowest rank."""
    values: dict[str, float] = {}
    for name in ("loss", "val_loss", "lr", "grad_norm", unit.name, *user_columns):
        if (row := next((row for row in rows if name in row.values), None)) is not None:
            values[name] = row.values[name]
    amount = values.pop(unit.name, None)
    durations = [row.values["step_s"] for row in rows if "step_s" in row.values]
    if durations:
        values["step_s"] = max(durations)
        if amount is not None:
            values[f"{unit.name}_per_s"] = amount / max(durations)
    return {**values, "world_size": rows[0].world_size}


@dataclass(frozen=True)
class ExportSummary:
    path: str  # empty where nothing was written here
    steps: int
    unreadable: int  # lines of the event files that were skipped


def export_metrics(run: RunFolder, kind: str, out: Path | None = None) -> ExportSummary:
    """Write the metrics of a run as `csv`, `jsonl` (`-` is stdout) or `tensorboard`, or send them to `wandb`."""
    metrics = RunMetrics(run)
    if kind == "wandb":
        return ExportSummary("", _send_to_wandb(metrics, out), metrics.unreadable)
    write = {"csv": write_csv, "jsonl": write_jsonl}.get(kind)
    if write is not None and str(out) == "-":
        return ExportSummary("-", write(metrics, sys.stdout), metrics.unreadable)
    path = out or run.path / ("tensorboard" if write is None else f"metrics.{kind}")
    try:
        if write is None:
            steps = write_tensorboard(metrics, path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _replaced(path) as new, new.open("w", encoding="utf-8", newline="") as file:
                steps = write(metrics, file)
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}",
            why="the run's records are safe; only the export made from them is missing",
            fix=f"write it elsewhere: shoal export {shlex.quote(str(run.path))} --format {kind} --out PATH",
        ) from None
    return ExportSummary(str(path), steps, metrics.unreadable)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which is put in place when it is whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        # In a folder that cannot be used this fails as the writing did, and would name the temporary file.
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_csv(metrics: RunMetrics, file: IO[str]) -> int:
    """Write one row per step and rank, with the same columns whatever the run has recorded; return the steps."""
    writer = csv.DictWriter(file, (*COLUMNS, *metrics.user_columns), restval="", lineterminator="\n")
    writer.writeheader()
    steps = 0
    for rows in metrics.steps():
        writer.writerows({**row.place(), **row.values} for row in rows)
        steps += 1
    return steps


def write_jsonl(metrics: RunMetrics, file: IO[str]) -> int:
    """Write one object per step and rank, without what was not recorded; return the steps."""
    steps = 0
    for rows in metrics.steps():
        for row in rows:
            values = {name: _json_number(row.values[name]) for name in COLUMNS if name in row.values}
            own = {name: _json_number(row.values[name]) for name in sorted(row.values.keys() - set(COLUMNS))}
            file.write(json.dumps({**row.place(), **values, **own}, allow_nan=False, ensure_ascii=False) + "\n")
        steps += 1
    return steps


def _json_number(value: float) -> float | str:
    """Return a number, or its name where JSON has no number for it: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def write_tensorboard(metrics: RunMetrics, folder: Path) -> int:
    """Write the scalars of the whole run into `folder`, and those of each rank into `folder/rank-N`; return the steps.

    TensorBoard draws the same scalar of several folders into one chart, so that ranks can be compared.
    """
    first = next(metrics.steps(), None)
    began = first[0].time if first else 0.0
    steps, writers = 0, dict[Path, ScalarWriter]()
    with contextlib.ExitStack() as stack:

        def writer_of(path: Path) -> ScalarWriter:
            if path not in writers:
                path.mkdir(parents=True, exist_ok=True)
                new = stack.enter_context(_replaced(path / event_file_name(began)))
                writers[path] = ScalarWriter(stack.enter_context(new.open("wb")), began)
            return writers[path]

        for rows in metrics.steps():
            steps += 1
            values = world_values(rows, metrics.unit, metrics.user_columns)
            writer_of(folder).write(rows[0].step, rows[0].time, values)
            for row in rows:
                times = {name: row.values[name] for name in RANK_COLUMNS if name in row.values}
                writer_of(folder / f"rank-{row.rank}").write(row.step, row.time, times)
    return steps


def _send_to_wandb(metrics: RunMetrics, folder: Path | None) -> int:
    run = shlex.quote(str(metrics.run.path))
    wandb = import_wandb(f" && shoal export {run} --format wandb")
    try:
        return replay(metrics, wandb, folder)
    except Exception as error:
        # Errors of another program, of any type: no network, no account, no disk.
        raise ShoalError(
            f"wandb failed: {type(error).__name__}: {error}",
            why="it has no account, network or disk here; the run's records are safe",
            fix=f"keep it on this disk, for wandb sync: WANDB_MODE=offline shoal export {run} --format wandb",
        ) from None


def replay(metrics: RunMetrics, wandb: WandbLike, folder: Path | None = None) -> int:
    """Send a run to `wandb.init`, `log` and `finish` as if it ran now; return the steps.

    The settings of the run become its config. Values of single ranks are named `rank-N/step_s`. Where it goes is
    wandb's choice, by its own variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE. Its files go into `folder`, if given.
    """
    run, steps = metrics.run, 0
    place = {} if folder is None else {"dir": str(folder)}
    wandb.init(name=run.path.name, config=read_document(run.config), job_type="train", **place)
    try:
        for rows in metrics.steps():
            values: dict[str, Any] = world_values(rows, metrics.unit, metrics.user_columns)
            for row in rows:
                times = {name: row.values[name] for name in RANK_COLUMNS if name in row.values}
                values |= {f"rank-{row.rank}/{name}": value for name, value in times.items()}
            wandb.log({**values, "time": rows[0].time}, step=rows[0].step)
            steps += 1
    finally:
        wandb.finish()
    return steps

"""Read a run folder piece by piece into a small state that can be shown at any moment.

A run may have 100,000 steps on 8 ranks and more. So steps are averaged over ranges (`StepSeries`), whose length doubles
whenever there are too many, and only the newest steps are kept one by one. Every byte of the folder is read once.
"""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.control.membership.types import NEVER, Ballot
from shoal.control.processes import SUPERVISOR, find_processes
from shoal.events import STEP_FIELDS, Event, EventTail
from shoal.records.rank_log import as_float, is_step, logged_values, read_ballot, read_entered
from shoal.run_folder import RunFolder
from shoal.terminal import printable_line
from shoal.tools.watch.step_series import (
    AMOUNT,
    EXPOSED,
    LOSS,
    RECENT_FIELDS,
    ROW_FIELDS,
    WAIT,
    RankState,
    StepSeries,
    ValueSeries,
    clean_name,
    finite,
)
from shoal.units import rank_names

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
_MOST_MARKS = 200  # of one kind; the newest are kept
_MOST_VALUES = 24  # names of values that a user's program recorded
_MOST_RANKS = 512
_LONGEST_TEXT = 500
_LONGEST_NAME = 80
# Of each file, before the others get their turn. Agents' files are small, and are read before those of the ranks.
_TURN_BYTES = 4 << 20
_RANK_TURN_BYTES = 1 << 18
# How long one poll may read: a viewer of a long run sees the part that has been read, and how much is left.
_TURN_S = 0.4
_FIND_FILES_S = 2.0
_LOOK_EVERY_S = 5.0
# A run without processes and without events for so long stands still.
_SILENT_S = 10.0

# Fields of a step that are shown elsewhere, beside those that shoal writes itself.
_NO_VALUES = STEP_FIELDS.union(("tokens", "ready_s", "tail_s"))


@dataclass
class NodeState:
    """What is known of one machine."""

    name: str
    address: str = ""
    interface: str = ""
    cores: int | None = None
    launch: str = ""
    has_left: bool = False
    sample: dict[str, float] = field(default_factory=dict)  # its load; see `LiveState._add_sample`


@dataclass
class Mark:
    """Something that happened, for the time line."""

    number: int
    kind: str
    time: float
    step: int | None
    text: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.number, "kind": self.kind, "time": self.time, "step": self.step, "text": self.text}


class LiveState:
    """The state of a run, brought up to date by `poll`.

    `take_changes` returns what changed since the last call, `everything` the whole run.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.stride = 1  # steps in one range
        self.ranks: dict[int, RankState] = {}
        self.nodes: dict[str, NodeState] = {}
        self.values: dict[str, ValueSeries] = {}
        self.val_loss = ValueSeries()
        self.supervisor: Event = {}
        self._supervisor_pid: int | None = None  # its number here, if it runs inside a node of a lab
        self._has_processes = True
        self._looked_at = -math.inf
        self.members: tuple[Ballot, tuple[str, ...]] = (NEVER, ())  # nodes of the newest generation, by the agents
        self.ids: tuple[Ballot, tuple[int, ...]] = (NEVER, ())  # ranks of the newest generation, by the ranks
        self.ended: Event | None = None
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.newest_launch: tuple[float, str] = (0.0, "")
        self._foreign = 0  # events of another rank or kind than their file
        self._marks: dict[tuple[str, object], Mark] = {}
        self._marks_of: Counter[str] = Counter()
        self.mark_counts: Counter[str] = Counter()  # of all marks by kind, also those that are no longer kept
        self.changes: set[Ballot] = set()  # generations that began while a launch went on
        self._fresh_marks: dict[int, Mark] = {}
        self._next_mark = 0
        self._steps_of: dict[Ballot, int] = {}
        self._tails: dict[Path, tuple[str, str | int, EventTail]] = {}
        self._files_at = -math.inf
        self._unread_bytes = 0
        self._size = 0
        self._documents: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._held: dict[int, dict[int, Event]] = {}  # steps of a measured script that not all ranks have recorded
        self._is_rebuilt = True
        self.has_news = False  # since the last update

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor's process exists on this machine."""
        if any(map(_is_shoal, (self.supervisor.get("pid"), self._supervisor_pid))):
            return True
        # Inside a node of a lab processes have other numbers than here. All processes are looked at, so not often.
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            processes = find_processes(self.run.path)
            self._has_processes = bool(processes) or not _sees_processes_of(self.run)
            self._supervisor_pid = next((one.pid for one in processes if one.part == SUPERVISOR), None)
        return self._supervisor_pid is not None

    @property
    def is_dead(self) -> bool:
        """Whether a run of this machine stands still, because none of its processes exists any more."""
        if self.ended is not None or not self.supervisor or self.is_supervised or self._has_processes:
            return False
        settings = self.document(self.run.config).get("run")
        on = settings.get("on") if isinstance(settings, dict) else self.document(self.run.job).get("on")
        is_silent = self.last_time is not None and time.time() - self.last_time > _SILENT_S
        return str(on).startswith(("local", "lab")) and is_silent

    # Reading.

    def poll(self) -> None:
        """Read what was appended, in turns that keep all ranks at about the same step, for at most `_TURN_S`."""
        now = time.monotonic()
        if now - self._files_at >= _FIND_FILES_S:
            self._files_at = now
            self._find_files()
        sizes = {path: _size(path) for path in self._tails}
        waiting = [
            path for path, (_, _, tail) in self._tails.items() if sizes[path] != tail.offset or tail.has_unfinished_line
        ]
        self._unread_bytes = sum(max(0, sizes[path] - self._tails[path][2].offset) for path in waiting)
        while waiting:
            slowest = min((self._last_step(path) for path in waiting), default=0)
            for path in waiting:
                kind, name, tail = self._tails[path]
                if kind == "rank" and self._last_step(path) > slowest:
                    continue
                for event in tail.poll(_RANK_TURN_BYTES if kind == "rank" else _TURN_BYTES):
                    self._add(kind, name, event)
                    self.has_news = True
            waiting = [path for path in waiting if self._tails[path][2].offset < sizes[path]]
            if time.monotonic() - now > _TURN_S:
                break
        self._size = sum(sizes.values())
        self._unread_bytes = sum(max(0, sizes[path] - self._tails[path][2].offset) for path in waiting)
        self._limit_buckets()

    def _last_step(self, path: Path) -> float:
        """Return the last step that was read of a rank's file; infinity for other files."""
        kind, name, _ = self._tails[path]
        rank = self.ranks.get(name) if isinstance(name, int) else None
        return math.inf if kind != "rank" else rank.last_step if rank is not None else -1

    @property
    def is_behind(self) -> bool:
        """Whether a long run has not been read to its end yet."""
        return self._unread_bytes > 0

    def _find_files(self) -> None:
        files: list[tuple[Path, str, str | int]] = [(path, "journal", path.stem) for path in self.run.journals()]
        files += [(path, "rank", rank) for rank, path in sorted(self.run.event_files().items())[:_MOST_RANKS]]
        files += [(path, "sample", path.stem) for path in sorted((self.run.path / "samples").glob("*.jsonl"))]
        # The supervisor repeats what the agents wrote; theirs is known by then.
        files.append((self.run.supervisor, "supervisor", ""))
        for path, kind, name in files:
            if path not in self._tails:
                self._tails[path] = (kind, name, EventTail(path))

    def _add(self, kind: str, name: str | int, event: Event) -> None:
        at = as_float(event.get("time"))
        if math.isfinite(at) and kind != "sample":
            self.first_time = at if self.first_time is None else min(at, self.first_time)
            self.last_time = at if self.last_time is None else max(at, self.last_time)
        if kind == "rank" and isinstance(name, int):
            # A machine that joined may write anything into its own rank's file.
            if event.get("rank") == name:
                self._add_rank_event(self.ranks.get(name) or self._new_rank(name), event)
            else:
                self._foreign += 1
        elif kind == "journal":
            self._add_agent_event(self.nodes.setdefault(str(name), NodeState(str(name))), event)
        elif kind == "supervisor":
            self._add_supervisor_event(event)
        else:
            self._add_sample(self.nodes.setdefault(str(name), NodeState(str(name))), event)

    def _new_rank(self, number: int) -> RankState:
        self.ranks[number] = RankState(number)
        return self.ranks[number]

    def _add_rank_event(self, rank: RankState, event: Event) -> None:
        match event["event"]:
            case "step":
                self._add_step(rank, event)
            case "loss":
                self._add_world_loss(rank, event)
            case "start":
                rank.start, rank.ended, rank.doing = event, None, ""
                if event["resumed_from"]:
                    step = event["resumed_from"]
                    self._mark("start", ("resumed", step), event, f"the run goes on after step {step}", step)
                if event.get("measured"):
                    # A script that was started again counts its steps from 1.
                    rank.last_step = -1
                    rank.series.cut(0)
                    rank.recent.clear()
            case "membership":
                self._add_membership(rank, event)
            case "lost":
                rank.is_lost = True
            case "eval":
                if math.isfinite(event["val_loss"]):
                    self.val_loss.add(rank.rank, event["step"], event["step"] // self.stride, event["val_loss"])
            case "log":
                self._add_values(rank.rank, event["step"], logged_values(event))
            case "checkpoint" if is_step(step := event.get("step")):
                self._mark("checkpoint", step, event, f"checkpoint of step {step}", step)
            case "choice":
                self._mark("verdict", event["step"], event, f"from here on {event['why']}", event["step"])
            case "divergence":
                self._add_divergence(event)
            case "warning":
                text = f"{event['seen']} ({self.run.name_in(event['fix'])})"
                self._mark("warning", event["seen"], event, text, _step(event))
            case "fault":
                self._mark("fault", event["seen"], event, event["seen"], _step(event))
            case "doing":
                rank.doing = event["text"]
            case "end":
                rank.ended, rank.doing = str(event.get("status"))[:_LONGEST_NAME], ""

    def _add_step(self, rank: RankState, event: Event) -> None:
        if event.get("ready_s") is None:
            self._record_step(rank, event)
            return
        # A script that is only measured: the wait is known when all ranks have recorded the step.
        held = self._held.setdefault(event["step"], {})
        held[rank.rank] = event
        most_held = _MOST_HELD_BEHIND if self.is_behind else _MOST_HELD
        if len(held) >= rank.start.get("world_size", 1) or len(self._held) > most_held:
            step = event["step"] if len(held) >= rank.start.get("world_size", 1) else min(self._held)
            events = self._held.pop(step)
            slowest_s = max(as_float(other.get("ready_s"), 0.0) for other in events.values())
            for number, other in sorted(events.items()):
                tail_s = as_float(other.get("tail_s"), 0.0)
                wait_s = min(tail_s, slowest_s - as_float(other.get("ready_s"), 0.0))
                self._record_step(self.ranks[number], {**other, "wait_s": wait_s, "exposed_s": tail_s - wait_s})

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
            self._mark("warning", "not finite", event, f"the loss is {event['loss']} since step {step}", step)
        values = (
            record[1] or 0.0, step_s, max(0.0, step_s - exposed_s - wait_s), exposed_s, wait_s, record[AMOUNT] or 0.0,
            math.nan if loss is None else loss,
        )  # fmt: skip
        rank.add(record, values, step // self.stride, min(_RECENT_STEPS, _MOST_RECENT // max(1, len(self.ranks))))
        if own_names := event.keys() - _NO_VALUES:
            self._add_values(rank.rank, step, {name: event[name] for name in own_names})

    def _add_world_loss(self, rank: RankState, event: Event) -> None:
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

    def _add_values(self, rank: int, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if (number := finite(value)) is None:
                continue
            if (series := self.values.get(name)) is None and len(self.values) < _MOST_VALUES:
                series = self.values.setdefault(clean_name(name), ValueSeries())
            if series is not None:
                series.add(rank, step, step // self.stride, number)

    def _add_membership(self, rank: RankState, event: Event) -> None:
        entered = read_entered(event)
        if entered is None:
            return
        rank.generation, rank.is_lost = entered.generation, False
        if entered.generation >= self.ids[0]:
            self.ids = (entered.generation, entered.ids)
        self._steps_of.setdefault(entered.generation, entered.step)
        if not entered.is_first:
            self.changes.add(entered.generation)
            text = f"generation {entered.generation}: {rank_names(sorted(entered.ids))}"
            self._mark("members", entered.generation, event, text, entered.step, keep=True)

    def _add_divergence(self, event: Event) -> None:
        ids = event.get("ranks")
        names = rank_names([rank for rank in ids if is_step(rank)]) if isinstance(ids, list) and ids else "a rank"
        self._mark("fault", ("divergence", event.get("step")), event, f"the replica of {names} differs", _step(event))

    def _add_agent_event(self, node: NodeState, event: Event) -> None:
        generation = read_ballot(event.get("generation") or event.get("id"))
        match event["event"]:
            case "ready":
                node.address, node.interface = clean_name(event.get("address")), clean_name(event["interface"])
                node.cores, node.launch, node.has_left = event["cores"], clean_name(event.get("launch")), False
                self.newest_launch = max(self.newest_launch, (as_float(event["time"], 0.0), node.launch))
            case "generation" if generation is not None:
                if generation >= self.members[0]:
                    self.members = (generation, tuple(event["members"]))
                if is_step(event.get("step")):
                    self._steps_of[generation] = event["step"]
                    if (mark := self._marks.get(("members", generation))) is not None and mark.step is None:
                        mark.step = event["step"]
                        self._fresh_marks[mark.number] = mark
            case "announce":
                self._mark("members", generation or event["text"], event, event["text"], self._step_at(generation))
            case "pause" | "abandon":
                self._mark("members", event["text"], event, event["text"], None)
            case "ended" if event["code"] and not event["by_agent"]:
                how = "ran out of memory" if event["out_of_memory"] else f"ended with code {event['code']}"
                if event["code"] < 0 and not event["out_of_memory"]:
                    how = f"was killed by signal {-event['code']}"
                self._mark("fault", (node.name, event["time"]), event, f"{event['name']} on {node.name} {how}", None)
            case "refused" | "state-lost":
                self._mark("fault", event["seen"], event, event["seen"], None)
            case "left":
                node.has_left = True

    def _step_at(self, generation: Ballot | None) -> int | None:
        return self._steps_of.get(generation) if generation is not None else None

    def _add_supervisor_event(self, event: Event) -> None:
        match event["event"]:
            case "supervising":
                self.supervisor, self.ended = event, None
            case "ended":
                self.ended = event
                seen = str(event.get("seen") or "the run has failed")
                text = self.run.name_in(seen) if event["code"] else "the run has ended well"
                self._mark("fault" if event["code"] else "end", ("end", event["time"]), event, text, None)
            case "note" if not any(mark.text == event["text"] for mark in self._marks.values()):
                self._mark("note", event["text"], event, event["text"], None)

    def _add_sample(self, node: NodeState, event: Event) -> None:
        """Keep the newest numbers that were sampled of a node, under the names that they have there."""
        numbers = {clean_name(name): number for name, value in event.items() if (number := finite(value)) is not None}
        node.sample = dict(list(numbers.items())[:_MOST_VALUES])

    def _mark(self, kind: str, key: object, event: Event, text: str, step: int | None, keep: bool = False) -> None:
        """Add a mark; one that is there already gets the new text, unless `keep`. All ranks record the same things."""
        known = self._marks.get((kind, key))
        text = printable_line(text, _LONGEST_TEXT)
        if known is not None:
            if keep or known.text == text:
                return
            known.text, known.step = text, known.step if step is None else step
            self._fresh_marks[known.number] = known
            return
        self._next_mark += 1
        mark = Mark(self._next_mark, kind, as_float(event.get("time"), 0.0), step, text)
        self._marks[kind, key] = self._fresh_marks[mark.number] = mark
        self._marks_of[kind] += 1
        self.mark_counts[kind] += 1
        if self._marks_of[kind] > _MOST_MARKS:
            oldest = next(name for name in self._marks if name[0] == kind)
            self._fresh_marks.pop(self._marks.pop(oldest).number, None)
            self._marks_of[kind] -= 1

    def _limit_buckets(self) -> None:
        """Double the length of all ranges until a viewer can be sent all of them."""
        newest = max((rank.last_step for rank in self.ranks.values()), default=0)
        newest = max(newest, self.val_loss.last_step, *(value.last_step for value in self.values.values()), 0)
        most = min(_MOST_BUCKETS, max(_FEWEST_BUCKETS, _MOST_ROWS // max(1, len(self.ranks))))
        while newest // self.stride >= most:
            self.stride *= 2
            self._is_rebuilt = True
            for series in self._all_series():
                series.merge_pairs()

    def _all_series(self) -> list[StepSeries]:
        values = [self.val_loss, *self.values.values()]
        return [*(rank.series for rank in self.ranks.values()), *(value.series for value in values)]

    def take_changes(self) -> dict[str, Any] | None:
        """Return what changed since the last call; None if a viewer needs everything, as ranges were merged.

        Single steps are sent when the run has been read to its end: the others are the last ones for a moment only.
        """
        ready = [rank for rank in self.ranks.values() if rank.fresh and not self.is_behind]
        changes: dict[str, Any] = {
            "rows": {rank.rank: rows for rank in self.ranks.values() if (rows := rank.series.take())},
            "recent": {rank.rank: list(rank.fresh.values()) for rank in ready},
            "values": {name: rows for name, value in self.values.items() if (rows := value.series.take())},
            "val_loss": self.val_loss.series.take() or [],
            "marks": [mark.as_json() for mark in self._fresh_marks.values()],
        }
        for rank in ready:
            rank.fresh.clear()
        self._fresh_marks.clear()
        is_rebuilt, self._is_rebuilt, self.has_news = self._is_rebuilt, False, False
        return None if is_rebuilt else changes

    def everything(self) -> dict[str, Any]:
        """Return what `take_changes` does for the whole run, for a viewer that connects; it takes nothing."""
        return {
            "row_fields": ROW_FIELDS,
            "recent_fields": RECENT_FIELDS,
            "stride": self.stride,
            "rows": {rank.rank: rank.series.means() for rank in self.ranks.values()},
            "recent": {} if self.is_behind else {rank.rank: list(rank.recent) for rank in self.ranks.values()},
            "values": {name: value.series.means() for name, value in self.values.items()},
            "val_loss": self.val_loss.series.means(),
            "marks": [mark.as_json() for mark in self._marks.values()],
        }

    @property
    def unreadable(self) -> int:
        """Lines that were skipped: no event, or not one of the file they are in."""
        return sum(tail.unreadable for _, _, tail in self._tails.values()) + self._foreign

    @property
    def unfinished(self) -> int:
        """Files that end in half a line."""
        return sum(tail.has_unfinished_line for _, _, tail in self._tails.values())

    @property
    def loaded(self) -> float:
        """The part of a long run that has been read."""
        return 1 - self._unread_bytes / self._size if self.is_behind and self._size else 1.0

    def document(self, path: Path) -> dict[str, Any]:
        """Return a small file of the folder, read again when it has changed; empty if it cannot be read."""
        try:
            changed = path.stat().st_mtime_ns
            if path in self._documents and self._documents[path][0] == changed:
                return self._documents[path][1]
            content = path.read_bytes()
            document = tomllib.loads(content.decode()) if path.suffix == ".toml" else json.loads(content)
        except (OSError, ValueError, RecursionError):
            return {}
        document = {"points": document} if isinstance(document, list) else document
        self._documents[path] = (changed, document if isinstance(document, dict) else {})
        return self._documents[path][1]


def _step(event: Event) -> int | None:
    step = event.get("step")
    return step if is_step(step) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sees_processes_of(run: RunFolder) -> bool:
    """Return whether this user would see the processes of the run: others' are seen by root only."""
    try:
        return os.geteuid() in (0, run.path.stat().st_uid)
    except OSError:
        return False


def _is_shoal(pid: Any) -> bool:
    """Return whether the process exists; a number that another program has got since does not count."""
    try:
        return is_step(pid) and b"shoal" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

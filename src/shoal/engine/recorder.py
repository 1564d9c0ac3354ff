"""What a rank writes while it trains: its event log, and on one rank per run folder the ledger (`commits.jsonl`).

The ledger has one line for every committed step. Each machine has a copy, which a rank brings up to date when it
returns or joins another lineage: see the functions below `Recorder`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from shoal.control.rank_messages import AbandonCommits
from shoal.cost.batch_plan import BatchPlan
from shoal.errors import CheckpointError, RunFailed, ShoalError
from shoal.events import FLUSH_S, Event, EventLog, FileMark, FileMarker, read_events, read_last_events, to_stderr
from shoal.host.facts import WireCounter
from shoal.run_folder import RunFolder
from shoal.sync.membership_client import MembershipClient
from shoal.sync.world import World, without_group
from shoal.units import Span, subtract_spans, to_spans

# One line of the ledger.
Record = dict[str, Any]

# Committed steps that a rank remembers: the rank that keeps the ledger may die before it has written them. It is behind
# by one step at most, or by one round in the modes with outer steps.
_REMEMBERED_COMMITS = 256
# The end of a ledger that is searched for recent steps: some thousand lines, many times what a rank remembers.
_TAIL_BYTES = 1 << 20


class StepProfiler:
    """Records the steps `first-last` of this rank with torch.profiler, for `shoal trace`.

    A failure of the profiler is a warning: it must not end a training.
    """

    def __init__(self, steps: str, path: Path, warn: Callable[[ShoalError], None]) -> None:
        first, _, last = steps.partition("-")
        self._steps = range(int(first), int(last or first) + 1)
        self._path = path
        self._warn = warn
        self._profile: Any = None

    def before_step(self, step: int) -> None:
        if step in self._steps and self._profile is None:
            import torch
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
            with self._warned():
                self._profile = profile(activities=activities)
                self._profile.start()

    def after_step(self, step: int) -> None:
        if self._profile is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Stop, and write what was recorded."""
        profile, self._profile = self._profile, None
        if profile is not None:
            # Renamed when it is whole: an agent may send it to another machine.
            new = self._path.with_suffix(".new.json")
            with self._warned():
                profile.stop()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(new))
                new.replace(self._path)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._profile = None
            self._warn(RunFailed(f"the steps are not profiled: {error}", fix="train without --profile-steps"))


class Recorder:
    def __init__(self, run: RunFolder, world: World, member: MembershipClient | None = None) -> None:
        self._run = run
        # Receives the committed steps, in a run whose members can change.
        self._member = member
        self._events = EventLog(run.events(world.id), world.id, self._warn_of_disk)
        # Stays open once opened: lines that could not be written yet must outlive a generation.
        self._ledger: EventLog | None = None
        self._marker = FileMarker(run.commits)
        self._pending: list[Record] = []
        self._committed: deque[Record] = deque(maxlen=_REMEMBERED_COMMITS)
        # Steps whose `step` event has only this rank's own loss.
        self._lacks_loss: set[int] = set()
        self._recorded_step = 0
        self.profiler: StepProfiler | None = None
        self._samples: EventLog | None = None
        # Receives every event of this rank, where it prints its own progress.
        self.on_event: Callable[[Event], None] = lambda event: None
        self._enter_world(world)

    def _enter_world(self, world: World) -> None:
        self._world = world
        self._wire = WireCounter(world.interface) if world.is_node_main else None
        if world.keeps_files:
            # The rank that wrote the ledger before may have been killed in the middle of a line.
            self.open_ledger().cut_torn_line()
        elif self._ledger is not None and self._ledger.kept:
            # The next writer of the ledger gets the newest steps from the memory of the other ranks and writes them.
            # Half of what they remember is certain: a rank that is ahead has forgotten some of what this rank has.
            # Older lines stay to be written here, unless they are in the file by then.
            certain = {_step_key(record) for record in list(self._committed)[-_REMEMBERED_COMMITS // 2 :]}
            self._ledger.drop_kept(lambda record: _step_key(record) in certain)

    def open_ledger(self) -> EventLog:
        """Return the one log through which this process writes to the ledger of its run folder."""
        if self._ledger is None:
            self._ledger = EventLog(self._run.commits, self._world.id, self._warn_of_disk)
        return self._ledger

    def drop_unwritten(self) -> None:
        """Drop unwritten lines on a rank that does not keep the ledger any more, when the run returns to a checkpoint.

        The steps of these lines are repeated; behind the new lines they would look like a fork.
        """
        if self._ledger is not None:
            self._ledger.drop_kept(lambda record: True)

    def _write_leftovers(self, log: EventLog) -> None:
        """Write the lines that a full disk refused, except those that another rank has written since."""
        if log.kept:
            written = {_step_key(record) for record in read_last_events(log.path, _TAIL_BYTES)}
            log.drop_kept(lambda record: _step_key(record) in written)
            log.retry()

    def enter_world(self, world: World, pending: list[Record]) -> None:
        """Continue in another world, with the steps that all its ranks have done and may not have committed."""
        self._enter_world(world)
        self._pending = pending
        self._lacks_loss.clear()

    def hold(self, pending: list[Record]) -> None:
        """Keep steps to be committed in a later generation, and record the world's loss of those that lack it.

        Without this the loss of a step that this rank did before the generation broke could be missing here: the rank
        that sent it may keep its events on another machine.
        """
        self._pending = pending
        generation = str(self._world.generation)
        for record in pending:
            if record["generation"] == generation and not record.get("partial") and record["step"] in self._lacks_loss:
                self._record_loss(record["step"], record["loss"])

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Keep a sample of this rank's machine."""
        if self._samples is None:
            self._samples = EventLog(self._run.samples(self._world.node), self._world.id, most_kept=100)
        self._samples.write("sample", **sample)

    def profile(self, steps: str) -> None:
        """Record these steps with torch.profiler."""
        self.profiler = StepProfiler(steps, self._run.profile(self._world.id), self.warn)

    def leave_world(self) -> None:
        self._world = without_group(self._world)

    def event(self, name: str, /, **fields: Any) -> None:
        self._events.write(name, **fields)
        self.on_event({"event": name, **fields})

    def step(self, step: int, phases: dict[str, float], own_loss: float, **fields: Any) -> None:
        """Record a step with the loss of the whole world, or with this rank's own loss until that is known."""
        seconds = {f"{name}_s": round(value, 7) for name, value in phases.items()}
        if self._wire is not None and (sent := self._wire.since_last()) is not None:
            fields["wire_bytes"] = sent
        world_loss = next((pending["loss"] for pending in self._pending if pending["step"] == step), None)
        loss = own_loss if world_loss is None else world_loss
        if self._world.size > 1:
            fields["own_loss"] = own_loss
        self.event("step", step=step, loss=loss, **fields, **seconds)
        self._recorded_step = step
        if self.profiler is not None:
            self.profiler.after_step(step)
        if world_loss is None:
            self._lacks_loss.add(step)

    def propose(self, step: int, first: int, plan: BatchPlan, loss: float) -> None:
        """Add a step that is done here. Whether all ranks have it is known when the next exchange succeeds."""
        self._pending.append(self.describe(step, first, plan, loss))
        if step <= self._recorded_step:
            self._record_loss(step, loss)

    def _record_loss(self, step: int, loss: float) -> None:
        self._events.write("loss", step=step, loss=loss)
        self._lacks_loss.discard(step)

    def describe(self, step: int, first: int, plan: BatchPlan, loss: float) -> Record:
        """Return the ledger's line of a step: its samples, from `first` on, and how many of them each member had."""
        world = self._world
        return {
            "step": step,
            "samples": [first, first + plan.global_batch],
            "members": list(world.ids),
            "shares": list(plan.shares),
            "generation": str(world.generation),
            "lineage": str(world.lineage.name),
            "loss": loss,
            "time": round(time.time(), 6),
        }

    @property
    def pending(self) -> list[Record]:
        return list(self._pending)

    @property
    def committed(self) -> list[Record]:
        """The newest steps that this rank knows to be committed, also those that another rank writes."""
        return list(self._committed)

    @property
    def newest_pending(self) -> int:
        """The last step that every rank is known to have done; 0 if none waits to be committed."""
        return max((pending["step"] for pending in self._pending), default=0)

    def forget_committed(self, after: int = 0) -> None:
        """Forget remembered commits after the step `after`: they may belong to an abandoned lineage."""
        kept = [record for record in self._committed if after and record["step"] <= after]
        self._committed.clear()
        self._committed.extend(kept)

    def commit(self, through: int | None = None) -> None:
        """Commit the pending steps, only up to `through` if later steps may still be repeated."""
        ready = [pending for pending in self._pending if through is None or pending["step"] <= through]
        if not ready:
            return
        if self._member is not None:
            self._member.fence.await_lease()
        if self._ledger is not None and self._world.keeps_files:
            for pending in ready:
                self._ledger.append(pending)
        elif self._ledger is not None:
            self._write_leftovers(self._ledger)
        self._pending = self._pending[len(ready) :]
        self._committed.extend(ready)
        if self._member is not None:
            self._member.committed(ready[-1]["step"])
        for record in ready:
            # Known to all ranks, also to those that write no ledger: not an event of the log.
            self.on_event({"event": "commit", **record})

    def warn(self, error: ShoalError, **fields: Any) -> None:
        self.event("warning", **error.as_dict(), **fields)

    def secure(self, timeout_s: float = 0.0) -> FileMark:
        """Put events and ledger on disk, so that they survive a power cut; return the mark of the ledger.

        Needed before every checkpoint: a run that resumes from it skips the steps that the ledger must have.
        """
        try:
            self._events.flush(timeout_s)
            self._events.sync()
            if self._ledger is None:
                return FileMark(0, "")
            self._ledger.flush(timeout_s)
            self._ledger.sync()
            return self._marker.mark()
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._run.commits} and {self._run.events(self._world.id)} to disk: "
                f"{error.strerror or error}",
                why="a checkpoint relies on them, so none is written now; older checkpoints are untouched",
                fix=f"free space or fix the folder: df -h {self._run.path}",
            ) from error

    def finish(self) -> None:
        """Write what is left of the ledger at the end of the training; raise if that is not possible."""
        if self._ledger is not None and not self._world.keeps_files:
            self._write_leftovers(self._ledger)
        if self._ledger is not None and (missing := self._ledger.flush(FLUSH_S)):
            raise RunFailed(
                f"the training has ended, but {missing:,} lines of its ledger could not be written: "
                f"{self._run.commits} is incomplete",
                why="the disk was full or not writable for too long",
                fix=f"free space (df -h {self._run.path}), then resume the run from its newest checkpoint",
            )

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.close()
        if self._ledger is not None:
            self._ledger.close()
        self._events.close()

    def _warn_of_disk(self, text: str) -> None:
        """Warn in the events and on stderr: the process log may lie on another disk."""
        to_stderr(text)
        if hasattr(self, "_events"):
            self.warn(RunFailed(text, why="the disk is or was full", fix=f"look at it: df -h {self._run.path}"))


def last_event(path: Path, kind: str) -> Event:
    """Return the last event of a kind in an event log; empty if there is none."""
    events: deque[Event] = deque(maxlen=1)
    with suppress(OSError):
        events.extend(event for event in read_events(path) if event.get("event") == kind)
    return events[-1] if events else {}


# This machine's copy of the ledger.


def last_step(path: Path, rank: int | None = None) -> int:
    """Return the last step of this copy, or the last one that `rank` took part in; 0 if there is none.

    Nodes that share a folder share a ledger: it may have steps that the others did without this node.
    """
    steps = (record for record in _read_all(path) if _is_step(record))
    return max((record["step"] for record in steps if rank is None or rank in record.get("members", [rank])), default=0)


def find_gaps(path: Path, step: int, kept: Iterable[Record] = ()) -> list[tuple[int, int]]:
    """Return ranges `(first, last)` of the steps up to `step` that this copy neither has nor has recorded as lost.

    `kept` are lines that wait to be written to it.
    """
    steps: set[int] = set()
    holes: list[Span] = []
    for record in chain(_read_all(path), kept):
        if _is_step(record):
            steps.add(record["step"])
        elif (hole := _hole(record)) is not None:
            holes.append(hole)
    return subtract_spans([(1, step)], [*to_spans(steps), *holes])


def record_holes(log: EventLog, ranges: Iterable[tuple[int, int]]) -> None:
    """Record that the lines of these steps are lost, so that `shoal verify` reports it."""
    _append(log, ({"hole": list(span)} for span in ranges))


def records_after(path: Path, step: int, kept: Iterable[Record] = ()) -> Iterator[Record]:
    """Return the steps after `step`, and all records of abandoned lineages: their steps must not be copied alone."""
    records = chain(_read_all(path), kept)
    return (record for record in records if "abandoned" in record or (_is_step(record) and record["step"] > step))


def missing_records(path: Path, records: Iterable[Record]) -> list[Record]:
    """Return those of the newest records that this copy lacks. Reads only its end, since all ranks wait."""
    known = {record_key(record) for record in read_last_events(path, _TAIL_BYTES) if _is_step(record)}
    return [record for record in records if record_key(record) not in known]


def mark_abandoned(log: EventLog, abandoned: Sequence[AbandonCommits]) -> None:
    """Mark the steps that this copy has of lineages that ended in favour of another one; each lineage once."""
    if not abandoned:
        return
    lines: list[Record] = [
        {"abandoned": str(commits.lineage), "standing": str(commits.surviving), "after": commits.shared_step}
        for commits in abandoned
    ]
    records = [*_read_all(log.path), *log.kept_events()]
    trained = {record.get("lineage") for record in filter(_is_step, records)}
    known = {record_key(record) for record in records}
    _append(log, [line for line in lines if line["abandoned"] in trained and record_key(line) not in known])


def add_missing(log: EventLog, records: Iterable[Record]) -> None:
    """Append the records that this copy lacks."""
    known = {record_key(record) for record in chain(_read_all(log.path), log.kept_events())}
    _append(log, (record for record in records if record_key(record) not in known))


def _append(log: EventLog, records: Iterable[Record]) -> None:
    """Write through the log that stays open for the ledger: it keeps the lines that a full disk refuses."""
    for record in records:
        log.append({"time": round(time.time(), 6)} | record)


def _step_key(record: Record) -> tuple[object, object]:
    return record.get("step"), record.get("generation")


def record_key(record: Record) -> tuple[int, str, str]:
    """Return what identifies a record: step and generation, the ends of a hole, or both lineages of an abandonment."""
    if _is_step(record):
        return record["step"], record.get("generation", ""), ""
    if (hole := _hole(record)) is not None:
        return hole[0], "hole", str(hole[1])
    return record.get("after", 0), record.get("abandoned", ""), record.get("standing", "")


def _hole(record: Record) -> tuple[int, int] | None:
    match record.get("hole"):
        case [int(first), int(last)]:
            return first, last
    return None


def _read_all(path: Path) -> Iterator[Record]:
    return read_events(path) if path.exists() else iter(())


def _is_step(record: Record) -> bool:
    return isinstance(record.get("step"), int)

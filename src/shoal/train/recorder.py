"""Everything a rank writes while it trains: its events, and on one rank per run folder the ledger."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from shoal.control.rank_messages import AbandonCommits
from shoal.errors import CheckpointError, RunFailed, ShoalError
from shoal.events import FLUSH_S, EventLog, FileMark, FileMarker, read_events, read_last_events, to_stderr
from shoal.run_folder import RunFolder
from shoal.sync.membership_client import MembershipClient
from shoal.sync.world import World, without_group
from shoal.units import Span, spans_of, subtract_spans

# One line of the ledger.
Record = dict[str, Any]

# As many committed steps as a rank remembers that keeps no ledger: whoever keeps it may die before it has written them.
# It is behind by a step at most, or by a round where replicas part.
_REMEMBERED = 256
# The end of a ledger, some thousand lines: read by a rank that has lines of it left to write and does not keep it now.
_LEFTOVER_BYTES = 1 << 20


class Recorder:
    """`member` is told of commits, where somebody counts on them."""

    def __init__(self, run: RunFolder, world: World, member: MembershipClient | None = None) -> None:
        self._run = run
        self._member = member
        self._events = EventLog(run.events(world.id), world.id, self._tell)
        # Once opened it stays open: lines that could not be written yet must not be lost with a generation.
        self._ledger: EventLog | None = None
        self._marker = FileMarker(run.commits)
        self._pending: list[Record] = []
        self._committed: deque[Record] = deque(maxlen=_REMEMBERED)
        # Steps whose `step` event has only this rank's own loss.
        self._lacks_loss: set[int] = set()
        self._enter(world)
        self._told_step = 0

    def _enter(self, world: World) -> None:
        self._world = world
        self._wire = WireCounter(world.interface) if world.is_node_main else None
        if world.keeps_files:
            # The rank that kept the ledger in between may have been killed in the middle of a line.
            self.open_ledger().cut_torn_line()
        elif self._ledger is not None and self._ledger.kept:
            self._hand_over(self._ledger)

    def open_ledger(self) -> EventLog:
        """The one log through which this process writes to the ledger of its run folder."""
        if self._ledger is None:
            self._ledger = EventLog(self._run.commits, self._world.id, self._tell)
        return self._ledger

    def drop_unwritten(self) -> None:
        """Of a rank that does not keep the ledger any more, when the run goes back to a checkpoint: the steps of these
        lines are done again, and behind the new lines they would look like a fork."""
        if self._ledger is not None:
            self._ledger.drop_kept(lambda record: True)

    def _hand_over(self, log: EventLog) -> None:
        """The rank that keeps the ledger from now on has the newest steps from the memory of the others and writes
        them. Half of what they remember is certain: one that is ahead has forgotten some of what we have. What is older
        stays to be written here, unless it is in the file by then."""
        certain = {_name(record) for record in list(self._committed)[-_REMEMBERED // 2 :]}
        log.drop_kept(lambda record: _name(record) in certain)

    def _write_leftovers(self, log: EventLog) -> None:
        if log.kept:
            written = {_name(record) for record in read_last_events(log.path, _LEFTOVER_BYTES)}
            log.drop_kept(lambda record: _name(record) in written)
            log.retry()

    def begin_anew(self, world: World, pending: list[Record]) -> None:
        """In another world, with what all of it has done and nobody may have committed."""
        self._enter(world)
        self._pending = pending
        self._lacks_loss.clear()

    def hold(self, pending: list[Record]) -> None:
        """To be committed in whichever generation comes to it. The world's loss of a step that this rank did before
        the generation broke is recorded here too: the rank that told it may keep its events on another machine."""
        self._pending = pending
        generation = str(self._world.generation)
        for record in pending:
            if record["generation"] == generation and not record.get("partial") and record["step"] in self._lacks_loss:
                self._record_loss(record["step"], record["loss"])

    def let_go(self) -> None:
        self._world = without_group(self._world)

    def event(self, name: str, **fields: Any) -> None:
        self._events.write(name, **fields)

    def step(self, step: int, phases: dict[str, float], own_loss: float, **fields: Any) -> None:
        """The loss is that of the whole world where it is known already, and this rank's own until it is."""
        seconds = {f"{name}_s": round(value, 7) for name, value in phases.items()}
        if self._wire is not None and (crossed := self._wire.since_last()) is not None:
            fields["wire_bytes"] = crossed
        known = next((pending["loss"] for pending in self._pending if pending["step"] == step), None)
        self._events.write("step", step=step, loss=own_loss if known is None else known, **fields, **seconds)
        self._told_step = step
        if known is None:
            self._lacks_loss.add(step)

    def propose(self, step: int, first: int, end: int, loss: float) -> None:
        """This step is done here; whether everybody had it is known when the next exchange succeeds."""
        self._pending.append(self.describe(step, first, end, loss))
        if step <= self._told_step:
            self._record_loss(step, loss)

    def _record_loss(self, step: int, loss: float) -> None:
        self._events.write("loss", step=step, loss=loss)
        self._lacks_loss.discard(step)

    def describe(self, step: int, first: int, end: int, loss: float) -> Record:
        world = self._world
        return {
            "step": step,
            "samples": [first, end],
            "members": list(world.ids),
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
        """The last that this rank knows to be committed, whoever had to write them down."""
        return list(self._committed)

    @property
    def newest_pending(self) -> int:
        """The last step that every rank is known to have done; 0 where none waits to be committed."""
        return max((pending["step"] for pending in self._pending), default=0)

    def forget_committed(self, after: int = 0) -> None:
        """Of a rank that copies another's state: what it knew may be of a training that was given up. Or of one that
        goes back to the step `after`."""
        kept = [record for record in self._committed if after and record["step"] <= after]
        self._committed.clear()
        self._committed.extend(kept)

    def commit(self, through: int | None = None) -> None:
        """What everybody is known to have; only up to the step `through` where later ones may still be done again."""
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

    def warn(self, error: ShoalError, **fields: Any) -> None:
        self._events.write("warning", **error.as_dict(), **fields)

    def secure(self, timeout_s: float = 0.0) -> FileMark:
        """Returns when events and ledger would survive a power cut; the mark is that of the ledger.

        Before every checkpoint: a run that is resumed from it skips the steps that the ledger must have.
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
        """At the end of the training. Raises where a part of the ledger could not be written, then or ever."""
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
        if self._ledger is not None:
            self._ledger.close()
        self._events.close()

    def _tell(self, text: str) -> None:
        """To the user, as a warning of this rank; and to its log, which may lie on another disk."""
        to_stderr(text)
        if hasattr(self, "_events"):
            self.warn(RunFailed(text, why="the disk is or was full", fix=f"look at it: df -h {self._run.path}"))


def _name(record: Record) -> tuple[object, object]:
    """The same step trained by the same generation is the same step."""
    return record.get("step"), record.get("generation")


class WireCounter:
    """Bytes this node sent over the interface the ranks use, from the kernel's own counter.

    Not from /sys/class/net: an emulated node has an eth0 of its own, and /sys may show the host's.
    """

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._last = self._read()

    def since_last(self) -> int | None:
        now = self._read()
        crossed = None if now is None or self._last is None else now - self._last
        self._last = now
        return crossed

    def _read(self) -> int | None:
        if self._interface is None:
            return None
        try:
            return sent_bytes(_COUNTERS.read_text(), self._interface)
        except OSError:
            counters = psutil.net_io_counters(pernic=True).get(self._interface)
            return counters.bytes_sent if counters else None


_COUNTERS = Path("/proc/self/net/dev")
_SENT = 8


def sent_bytes(table: str, interface: str) -> int | None:
    """The ninth number of the interface's line: eight about receiving come first."""
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[_SENT])
    return None


# SECTION train/ledger
# This machine's copy of the ledger, brought up to date by a rank that comes back or changes sides.


# A few thousand steps: many times what a rank remembers of those that it has not written itself.
_END_BYTES = 1 << 20


def last_step(path: Path, rank: int | None = None) -> int:
    """The last step that this copy has, or that `rank` took part in; 0 where there is none.

    Nodes that share a folder share a ledger: a node that comes back finds there what the others did without it.
    """
    steps = (record for record in _all(path) if _is_step(record))
    return max((record["step"] for record in steps if rank is None or rank in record.get("members", [rank])), default=0)


def lacking(path: Path, step: int, kept: Iterable[Record] = ()) -> list[tuple[int, int]]:
    """Ranges `(first, last)` of the steps up to `step` that this copy has no line of, and has not recorded as lost.
    `kept`: lines that wait to be written into it."""
    steps: set[int] = set()
    holes: list[Span] = []
    for record in chain(_all(path), kept):
        if _is_step(record):
            steps.add(record["step"])
        elif (hole := _hole(record)) is not None:
            holes.append(hole)
    return subtract_spans([(1, step)], [*spans_of(steps), *holes])


def record_holes(log: EventLog, ranges: Iterable[tuple[int, int]]) -> None:
    """Writes down that the lines of these steps are lost: `shoal verify` then says so instead of guessing."""
    _append(log, ({"hole": list(each)} for each in ranges))


def after(path: Path, step: int, kept: Iterable[Record] = ()) -> Iterator[Record]:
    """With every word of what was given up: steps of such a lineage must not come without it."""
    records = chain(_all(path), kept)
    return (record for record in records if "abandoned" in record or (_is_step(record) and record["step"] > step))


def missing(path: Path, records: Iterable[Record]) -> list[Record]:
    """Those of the newest that this copy has not. Only its end is read: everybody waits, and it may be long."""
    known = {name_of(record) for record in _last_steps(path)}
    return [record for record in records if name_of(record) not in known]


def give_up(log: EventLog, given_up: Sequence[AbandonCommits]) -> None:
    """Marks what this copy has of lineages that ended when they met another one; once, however many say so."""
    if not given_up:
        return
    lines = [_abandoned(each) for each in given_up]
    records = _known(log)
    trained = {record.get("lineage") for record in filter(_is_step, records)}
    known = {name_of(record) for record in records}
    _append(log, [line for line in lines if line["abandoned"] in trained and name_of(line) not in known])


def amend(log: EventLog, records: Iterable[Record]) -> None:
    """What the others have done meanwhile and is not here."""
    known = {name_of(record) for record in _known(log)}
    _append(log, (record for record in records if name_of(record) not in known))


def _abandoned(each: AbandonCommits) -> Record:
    return {"abandoned": str(each.lineage), "standing": str(each.standing), "after": each.shared_step}


def _append(log: EventLog, records: Iterable[Record]) -> None:
    """With the log that stays open for the ledger: what a full disk does not take now is kept there, not lost."""
    for record in records:
        log.append({"time": round(time.time(), 6)} | record)


def _known(log: EventLog) -> list[Record]:
    return [*_all(log.path), *log.kept_events()]


def name_of(record: Record) -> tuple[int, str, str]:
    """The same step trained by the same generation is the same step; and the same lineage is given up for the same
    one once."""
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


def _all(path: Path) -> Iterator[Record]:
    return read_events(path) if path.exists() else iter(())


def _last_steps(path: Path) -> list[Record]:
    return list(filter(_is_step, read_last_events(path, _END_BYTES)))


def _is_step(record: Record) -> bool:
    return isinstance(record.get("step"), int)

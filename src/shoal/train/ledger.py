"""This machine's copy of the ledger, brought up to date by a rank that comes back or changes sides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from shoal.control.rankline import GiveUp
from shoal.events import EventLog, read_events, read_last_events
from shoal.train.recorder import Record
from shoal.units import Span, spans_of, subtract_spans

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


def give_up(log: EventLog, given_up: Sequence[GiveUp]) -> None:
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


def _abandoned(each: GiveUp) -> Record:
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

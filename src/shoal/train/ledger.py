"""This machine's copy of the ledger, brought up to date by a rank that comes back or changes sides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.control.rankline import GiveUp
from shoal.events import EventLog, parse_event, read_events
from shoal.train.recorder import Record

# A few thousand steps: many times what a rank remembers of those that it has not written itself.
_END_BYTES = 1 << 20


def last_step(path: Path) -> int:
    """The last step that this copy has; 0 where there is none."""
    return max((record["step"] for record in _steps(path)), default=0)


def after(path: Path, step: int) -> list[Record]:
    return [record for record in _steps(path) if record["step"] > step]


def missing(path: Path, records: Iterable[Record]) -> list[Record]:
    """Those of the newest that this copy has not. Only its end is read: everybody waits, and it may be long."""
    known = {_name(record) for record in _last_steps(path)}
    return [record for record in records if _name(record) not in known]


def amend(path: Path, rank: int, given_up: Sequence[GiveUp], records: Iterable[Record]) -> None:
    """First what was given up of what stands here, then what the others have done meanwhile and is not here."""
    steps = _steps(path)
    known, lineages_here = {_name(record) for record in steps}, {record.get("lineage") for record in steps}
    log = EventLog(path, rank)
    try:
        for each in (each for each in given_up if str(each.lineage) in lineages_here):
            lineages = {"abandoned": str(each.lineage), "standing": str(each.standing)}
            log.append({**lineages, "after": each.shared_step, "time": round(time.time(), 6)})
        for record in records:
            if _name(record) not in known:
                log.append(record)
    finally:
        log.close()


def _name(record: Record) -> tuple[int, str]:
    """The same step trained by the same generation is the same step."""
    return record["step"], record.get("generation", "")


def _steps(path: Path) -> list[Record]:
    return [] if not path.exists() else list(filter(_is_step, read_events(path)))


def _last_steps(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        found = map(parse_event, file.read().split(b"\n"))
    return [record for record in found if record is not None and _is_step(record)]


def _is_step(record: Record) -> bool:
    return isinstance(record.get("step"), int)

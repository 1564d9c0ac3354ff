"""This machine's copy of the ledger, brought up to date by a rank that comes back or changes sides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.control.rankline import GiveUp
from shoal.events import EventLog, read_events
from shoal.train.recorder import Record


def last_step(path: Path) -> int:
    """The last step that this copy has; 0 where there is none."""
    return max((record["step"] for record in _steps(path)), default=0)


def after(path: Path, step: int) -> list[Record]:
    return [record for record in _steps(path) if record["step"] > step]


def amend(path: Path, rank: int, given_up: Sequence[GiveUp], records: Iterable[Record]) -> None:
    """First what was given up, then what the others have done meanwhile and is not here."""
    known = {_name(record) for record in _steps(path)}
    log = EventLog(path, rank)
    try:
        for each in given_up:
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
    if not path.exists():
        return []
    return [record for record in read_events(path) if isinstance(record.get("step"), int)]

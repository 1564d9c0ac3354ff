"""Reads what is to be explained: a log, a stream, or everything a run left behind. Bounded memory, whatever comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shoal.errors import DataError, from_dict
from shoal.events import Event, parse_event
from shoal.net.explain import Findings, Line, explain, merge
from shoal.runfolder import RunFolder

# No line that matters is longer; a file without line ends is read in pieces.
_MOST_OF_A_LINE = 1 << 16


def explain_stream(stream: BinaryIO, source: str = "") -> Findings:
    return explain(_lines(stream), source)


def explain_file(path: Path, source: str = "") -> Findings:
    try:
        with path.open("rb") as file:
            return explain(_lines(file), source)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None


def explain_run(run: RunFolder) -> Findings:
    """The keeper's words first: it knows who failed first. Nothing of a run whose last launch ended well."""
    if _ended_well(run):
        return Findings()
    logs = [
        *sorted(run.path.glob("logs/*/*.log")),
        *sorted(run.path.glob("agents/*.log")),
        run.keeper.with_suffix(".log"),
    ]
    journals = [run.keeper, *sorted(run.path.glob("agents/*.jsonl"))]
    return merge(
        [
            *(explain(_said(path), _name(run, path)) for path in journals if path.is_file()),
            *(explain_file(path, _name(run, path)) for path in logs if path.is_file()),
        ]
    )


def _name(run: RunFolder, path: Path) -> str:
    return str(path.relative_to(run.path))


def _lines(stream: BinaryIO) -> Iterator[Line]:
    """What is no text becomes signs for that; a line that goes on beyond its piece keeps its number."""
    number, is_new = 0, True
    while piece := stream.readline(_MOST_OF_A_LINE):
        number += is_new
        is_new = piece.endswith(b"\n")
        yield number, piece.decode(errors="replace").rstrip("\r\n")


def _last_launch(path: Path) -> list[tuple[int, Event]]:
    """Numbered. What an earlier launch met is history: a keeper begins anew, an agent names the launch."""
    with path.open("rb") as file:
        events = [(number, event) for number, line in enumerate(file, 1) if (event := parse_event(line)) is not None]
    begins = [place for place, (_, event) in enumerate(events) if event.get("event") == "keeping"]
    newest = events[begins[-1] :] if begins else events
    return [each for each in newest if each[1].get("launch") == newest[-1][1].get("launch")]


def _said(path: Path) -> Iterator[Line]:
    """The words in a file of events: errors as a user sees them, and notes."""
    for number, event in _last_launch(path):
        words = from_dict(event).render() if "seen" in event else str(event.get("text") or event.get("how") or "")
        yield from ((number, line) for line in words.splitlines())


def _ended_well(run: RunFolder) -> bool:
    if not run.keeper.is_file():
        return False
    ends = [event for _, event in _last_launch(run.keeper) if event.get("event") == "ended"]
    return bool(ends) and ends[-1].get("code") == 0

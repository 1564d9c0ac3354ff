"""The lines of a ledger, sorted by the lineage that wrote them. Pure.

Two ranks that keep one folder may write at the same time, and whoever joins copies lines that others wrote. So the
order of lines says little within a lineage, where generations and steps say it all; between two lineages it says
whether one came after the other or both ran at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.control.membership.generation import NEVER, Ballot
from shoal.events import Event
from shoal.report.ballots import read_ballot
from shoal.report.ranklog import is_step

Range = tuple[int, int]


class Entry(NamedTuple):
    line: int
    step: int
    samples: Range
    generation: Ballot


class Abandonment(NamedTuple):
    """A lineage that was given up for another one; both have what was committed up to `after`."""

    lineage: Ballot
    standing: Ballot
    after: int


@dataclass
class Chapter:
    """What one lineage committed, in the order in which it did."""

    lineage: Ballot
    entries: list[Entry] = field(default_factory=list)

    @property
    def steps(self) -> Range:
        """The lowest and the highest."""
        return min(entry.step for entry in self.entries), max(entry.step for entry in self.entries)

    @property
    def lines(self) -> Range:
        return min(entry.line for entry in self.entries), max(entry.line for entry in self.entries)

    def take(self, is_void: Callable[[int], bool]) -> int:
        """Takes the entries of such steps out; how many there were."""
        kept = [entry for entry in self.entries if not is_void(entry.step)]
        taken, self.entries = len(self.entries) - len(kept), kept
        return taken


@dataclass
class Pages:
    """A ledger as it was read."""

    chapters: list[Chapter] = field(default_factory=list)
    abandonments: list[Abandonment] = field(default_factory=list)
    generations: set[Ballot] = field(default_factory=set)
    # Steps, first and last, whose lines a resumed run found to be lost.
    holes: list[Range] = field(default_factory=list)
    unreadable: int = 0

    @property
    def lineages(self) -> set[Ballot]:
        return {chapter.lineage for chapter in self.chapters}


def read_pages(records: Iterable[Event]) -> Pages:
    pages = Pages()
    open_chapters: dict[Ballot, Chapter] = {}
    seen: set[tuple[int, Ballot, Range]] = set()
    for line, record in enumerate(records):
        if "hole" in record and (hole := _range(record["hole"])) is not None:
            pages.holes.append(hole)
            continue
        found = _abandonment(record) if "abandoned" in record else _entry(line, record)
        match found:
            case None:
                pages.unreadable += 1
            case Abandonment():
                pages.abandonments.append(found)
            case entry, lineage:
                # A generation trains forwards only: the same step of it is the same step. Launches without membership
                # share one name, and what they repeat was done again.
                key = (entry.step, entry.generation, entry.samples)
                if entry.generation != NEVER and key in seen:
                    continue
                seen.add(key)
                pages.generations.add(entry.generation)
                _chapter_of(lineage, open_chapters, pages).entries.append(entry)
    for chapter in pages.chapters:
        _put_in_order(chapter)
    return pages


def _chapter_of(lineage: Ballot, open_chapters: dict[Ballot, Chapter], pages: Pages) -> Chapter:
    """Lines of launches without membership are one lineage only as long as nobody else writes in between."""
    if lineage != NEVER:
        open_chapters.pop(NEVER, None)
    if lineage not in open_chapters:
        open_chapters[lineage] = Chapter(lineage)
        pages.chapters.append(open_chapters[lineage])
    return open_chapters[lineage]


def _put_in_order(chapter: Chapter) -> None:
    if chapter.lineage != NEVER:
        chapter.entries.sort(key=lambda entry: (entry.generation, entry.step, entry.line))


def _entry(line: int, record: Event) -> tuple[Entry, Ballot] | None:
    step, samples = record.get("step"), _range(record.get("samples"))
    generation, lineage = read_ballot(record.get("generation")), read_ballot(record.get("lineage"))
    if not is_step(step) or samples is None or generation is None or lineage is None:
        return None
    return Entry(line, step, samples, generation), lineage


def _abandonment(record: Event) -> Abandonment | None:
    lineage, standing, after = (
        read_ballot(record["abandoned"]),
        read_ballot(record.get("standing")),
        record.get("after"),
    )
    if lineage is None or standing is None or not is_step(after):
        return None
    return Abandonment(lineage, standing, after)


def _range(samples: Any) -> Range | None:
    if not (isinstance(samples, list) and len(samples) == 2 and all(is_step(position) for position in samples)):
        return None
    first, end = samples
    return (first, end) if first <= end else None


def ran_at_once(pages: Pages) -> Iterator[tuple[Chapter, Chapter, int]]:
    """Pairs of lineages that trained the same steps at the same time, and the first of these steps.

    A launch that resumes a run begins to write after the last line of the one before it, so it only goes back.
    """
    standing = sorted((chapter for chapter in pages.chapters if chapter.entries), key=lambda chapter: chapter.lines)
    for place, later in enumerate(standing):
        for earlier in standing[:place]:
            if not (earlier.entries and later.entries) or earlier.lines[1] < later.lines[0]:
                continue
            first = max(earlier.steps[0], later.steps[0])
            if first <= min(earlier.steps[1], later.steps[1]):
                yield earlier, later, first

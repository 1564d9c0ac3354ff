"""Was every sample used exactly once? The answer from `commits.jsonl`, the data ledger.

A record says that step `s` took the global positions `[first, end)` and brought the state from `s-1` to `s`.

A step may be recorded again: after a resume, the steps since the checkpoint are done anew. Such a *redo* is no error.
It starts at the position where the step started before, because the cursor belongs to the state that the run went back
to, and it supersedes the earlier record of its step and of every later one, whose updates were thrown away with their
state. A step that is recorded again from another position is a *double*: the run went back, but its cursor did not.

Where machines lost each other, two lineages may have trained the same steps. One of them is marked *abandoned* when
they meet, and what it did since they parted does not count. Two that both stand are a *fork*: nobody has said which of
the two models is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, computed_field

from shoal.control.membership.types import NEVER, Ballot
from shoal.events import Event
from shoal.tools.report.rank_log import is_step, read_ballot
from shoal.units import spans_of, subtract_spans

# SECTION report/chapters
# The lines of a ledger, sorted by the lineage that wrote them. Pure.
#
# Two ranks that keep one folder may write at the same time, and whoever joins copies lines that others wrote. So the
# order of lines says little within a lineage, where generations and steps say it all; between two lineages it says
# whether one came after the other or both ran at once.


Range = tuple[int, int]


class Commit(NamedTuple):
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
class LineageLog:
    """What one lineage committed, in the order in which it did."""

    lineage: Ballot
    entries: list[Commit] = field(default_factory=list)

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
class CommitLog:
    """A ledger as it was read."""

    chapters: list[LineageLog] = field(default_factory=list)
    abandonments: list[Abandonment] = field(default_factory=list)
    generations: set[Ballot] = field(default_factory=set)
    # Steps, first and last, whose lines a resumed run found to be lost.
    holes: list[Range] = field(default_factory=list)
    unreadable: int = 0

    @property
    def lineages(self) -> set[Ballot]:
        return {chapter.lineage for chapter in self.chapters}


def read_pages(records: Iterable[Event]) -> CommitLog:
    pages = CommitLog()
    open_chapters: dict[Ballot, LineageLog] = {}
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


def _chapter_of(lineage: Ballot, open_chapters: dict[Ballot, LineageLog], pages: CommitLog) -> LineageLog:
    """Lines of launches without membership are one lineage only as long as nobody else writes in between."""
    if lineage != NEVER:
        open_chapters.pop(NEVER, None)
    if lineage not in open_chapters:
        open_chapters[lineage] = LineageLog(lineage)
        pages.chapters.append(open_chapters[lineage])
    return open_chapters[lineage]


def _put_in_order(chapter: LineageLog) -> None:
    if chapter.lineage != NEVER:
        chapter.entries.sort(key=lambda entry: (entry.generation, entry.step, entry.line))


def _entry(line: int, record: Event) -> tuple[Commit, Ballot] | None:
    step, samples = record.get("step"), _range(record.get("samples"))
    generation, lineage = read_ballot(record.get("generation")), read_ballot(record.get("lineage"))
    if not is_step(step) or samples is None or generation is None or lineage is None:
        return None
    return Commit(line, step, samples, generation), lineage


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


def ran_at_once(pages: CommitLog) -> Iterator[tuple[LineageLog, LineageLog, int]]:
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


class ForkedSteps(BaseModel):
    """Two lineages that both trained the steps `first` to `last`."""

    lineages: tuple[str, str]
    first: int
    last: int


class LedgerReport(BaseModel):
    """`gaps` were skipped, `overlaps` were used by more than one step; both are `[first, end)` of global positions.
    `redone` and `abandoned` count records that don't stand, `generations` and `lineages` all that wrote any. `last` is
    the last step. Steps up to it that no record has are `missing`, first and last of each range; those that a resumed
    run recorded as lost are `holes` instead. `misplaced` steps do not begin where the one before them ended."""

    steps: int
    samples: int
    gaps: list[Range]
    overlaps: list[Range]
    doubles: list[int]
    forked: list[ForkedSteps]
    redone: int
    abandoned: int
    generations: int
    lineages: int
    unreadable: int
    last: int = 0
    missing: list[Range] = []
    holes: list[Range] = []
    misplaced: list[int] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        samples = self.gaps or self.overlaps or self.doubles or self.misplaced
        return not (samples or self.forked or self.unreadable or self.missing or self.holes)


@dataclass
class _Ledger:
    """The records that stand, by step."""

    ranges: dict[int, Range] = field(default_factory=dict)
    last: int = -1
    doubles: set[int] = field(default_factory=set)
    redone: int = 0

    def add(self, entry: Commit) -> None:
        step, samples = entry.step, entry.samples
        if step <= self.last:
            self._go_back(step, samples[0])
        self.ranges[step] = samples
        self.last = step

    def _go_back(self, step: int, first: int) -> None:
        if step in self.ranges and self.ranges[step][0] != first:
            self.doubles.add(step)
        kept = {earlier: samples for earlier, samples in self.ranges.items() if earlier < step}
        self.redone += len(self.ranges) - len(kept)
        self.ranges = kept


def check_ledger(commits: Iterable[Event]) -> LedgerReport:
    """An empty ledger is in order: nothing was used, nothing twice."""
    pages = read_pages(commits)
    generations, lineages = len(pages.generations), len(pages.lineages)
    abandoned = sum(_give_up(pages, each) for each in pages.abandonments)
    forked = _part_forks(pages)
    ledger = _Ledger()
    for chapter in sorted((each for each in pages.chapters if each.entries), key=lambda chapter: chapter.lines):
        for entry in chapter.entries:
            ledger.add(entry)
    gaps, overlaps = find_gaps_and_overlaps(ledger.ranges.values())
    last, present = max(ledger.ranges, default=0), spans_of(ledger.ranges)
    return LedgerReport(
        steps=len(ledger.ranges),
        samples=sum(end - first for first, end in ledger.ranges.values()),
        gaps=gaps,
        overlaps=overlaps,
        doubles=sorted(ledger.doubles),
        forked=forked,
        redone=ledger.redone,
        abandoned=abandoned,
        generations=generations,
        lineages=lineages,
        unreadable=pages.unreadable,
        last=last,
        missing=subtract_spans([(1, last)], [*present, *pages.holes]),
        holes=subtract_spans(pages.holes, present),
        misplaced=_misplaced(ledger.ranges),
    )


def _misplaced(ranges: dict[int, Range]) -> list[int]:
    """Steps whose samples do not follow those of the step before."""
    return [step for step, (first, _) in ranges.items() if step - 1 in ranges and ranges[step - 1][1] != first]


def _give_up(pages: CommitLog, given: Abandonment) -> int:
    """How many entries no longer stand. The standing lineage may have left the other one a step after the last that
    both surely shared: what it was built on, and nobody else wrote down, stays."""
    others = [chapter for chapter in pages.chapters if chapter.lineage != given.lineage]
    heirs = [each for each in others if each.lineage == given.standing and each.entries]
    began = min((each.steps[0] for each in heirs), default=0) if given.lineage.number < given.standing.number else 0
    known = {entry.step for chapter in others for entry in chapter.entries}

    def is_void(step: int) -> bool:
        return step > given.after and (step >= began or step in known)

    return sum(chapter.take(is_void) for chapter in pages.chapters if chapter.lineage == given.lineage)


def _part_forks(pages: CommitLog) -> list[ForkedSteps]:
    """Names every fork and leaves only its longer branch, so that gaps and overlaps are judged as if that one stood."""
    found = []
    for earlier, later, first in ran_at_once(pages):
        last = min(earlier.steps[1], later.steps[1])
        found.append(ForkedSteps(lineages=(str(earlier.lineage), str(later.lineage)), first=first, last=last))
        shorter = later if later.steps[1] <= earlier.steps[1] else earlier
        shorter.take(first.__le__)
    return found


def find_gaps_and_overlaps(ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """What lies between the ranges, counted from position 0, and what more than one of them holds."""
    gaps: list[Range] = []
    overlaps: list[Range] = []
    cursor = 0
    for first, end in sorted(ranges):
        if first > cursor:
            gaps.append((cursor, first))
        elif first < min(cursor, end):
            overlaps.append((first, min(cursor, end)))
        cursor = max(cursor, end)
    return gaps, overlaps

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

from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, computed_field

from shoal.events import Event
from shoal.report.chapters import Abandonment, Entry, Pages, Range, ran_at_once, read_pages
from shoal.units import spans_of, subtract_spans


class Fork(BaseModel):
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
    forked: list[Fork]
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

    def add(self, entry: Entry) -> None:
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


def _give_up(pages: Pages, given: Abandonment) -> int:
    """How many entries no longer stand. The standing lineage may have left the other one a step after the last that
    both surely shared: what it was built on, and nobody else wrote down, stays."""
    others = [chapter for chapter in pages.chapters if chapter.lineage != given.lineage]
    heirs = [each for each in others if each.lineage == given.standing and each.entries]
    began = min((each.steps[0] for each in heirs), default=0) if given.lineage.number < given.standing.number else 0
    known = {entry.step for chapter in others for entry in chapter.entries}

    def is_void(step: int) -> bool:
        return step > given.after and (step >= began or step in known)

    return sum(chapter.take(is_void) for chapter in pages.chapters if chapter.lineage == given.lineage)


def _part_forks(pages: Pages) -> list[Fork]:
    """Names every fork and leaves only its longer branch, so that gaps and overlaps are judged as if that one stood."""
    found = []
    for earlier, later, first in ran_at_once(pages):
        last = min(earlier.steps[1], later.steps[1])
        found.append(Fork(lineages=(str(earlier.lineage), str(later.lineage)), first=first, last=last))
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

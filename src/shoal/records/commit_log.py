"""Check the commit log `commits.jsonl`: was every sample used exactly once?

A record states that step `s` took the global sample positions `[first, end)` and moved the state from `s-1` to `s`.

A resumed run repeats the steps since its checkpoint and records them again. Such a *redo* is not an error. It starts at
the position where the step started before, because the data cursor belongs to the restored state. It supersedes the
earlier records of its step and of every later one, whose updates were lost with their state. A step recorded again
from another position is a *double*: the run went back, but its cursor did not.

After a network partition two lineages may have trained the same steps. When they meet, one is marked *abandoned*, and
its steps since the partition do not count. Two lineages that both stand are a *fork*: no record decides which of the
two models is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, computed_field

from shoal.control.membership.types import NEVER, Ballot
from shoal.events import Event
from shoal.records.rank_log import is_step, read_ballot
from shoal.units import subtract_spans, to_spans

Range = tuple[int, int]


class ForkedSteps(BaseModel):
    """Two lineages that both trained the steps `first` to `last`."""

    lineages: tuple[str, str]
    first: int
    last: int


class LedgerReport(BaseModel):
    steps: int
    samples: int
    gaps: list[Range]  # sample positions [first, end) that no step used
    overlaps: list[Range]  # sample positions [first, end) that more than one step used
    doubles: list[int]  # steps recorded again from another position
    forked: list[ForkedSteps]
    redone: int  # records superseded by a redo
    abandoned: int  # records of abandoned lineages
    generations: int  # all that wrote a record, standing or not
    lineages: int
    unreadable: int
    last: int = 0  # the last step
    missing: list[Range] = []  # steps (first, last) up to the last one that no record has
    holes: list[Range] = []  # steps (first, last) that a resumed run recorded as lost
    misplaced: list[int] = []  # steps that do not start where the step before ended
    misdivided: list[int] = []  # steps whose shares are not one for each member, or do not add up to the samples

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        samples = self.gaps or self.overlaps or self.doubles or self.misplaced or self.misdivided
        return not (samples or self.forked or self.unreadable or self.missing or self.holes)


def check_ledger(records: Iterable[Event]) -> LedgerReport:
    """Check the records of a commit log. An empty log is in order: no sample was used, none was used twice."""
    records = list(records)
    log = read_commit_log(records)
    generations, lineages = len(log.generations), len({branch.lineage for branch in log.branches})
    abandoned = sum(_drop_abandoned(log, abandonment) for abandonment in log.abandonments)
    forked = _resolve_forks(log)
    ranges: dict[int, Range] = {}  # samples of the records that stand, by step
    doubles: set[int] = set()
    redone, last = 0, -1
    for branch in _sort_by_line(log):
        for commit in branch.commits:
            if commit.step <= last:
                if commit.step in ranges and ranges[commit.step][0] != commit.samples[0]:
                    doubles.add(commit.step)
                kept = {step: samples for step, samples in ranges.items() if step < commit.step}
                redone += len(ranges) - len(kept)
                ranges = kept
            ranges[commit.step] = commit.samples
            last = commit.step
    gaps, overlaps = find_gaps_and_overlaps(ranges.values())
    last, present = max(ranges, default=0), to_spans(ranges)
    return LedgerReport(
        steps=len(ranges),
        samples=sum(end - first for first, end in ranges.values()),
        gaps=gaps,
        overlaps=overlaps,
        doubles=sorted(doubles),
        forked=forked,
        redone=redone,
        abandoned=abandoned,
        generations=generations,
        lineages=lineages,
        unreadable=log.unreadable,
        last=last,
        missing=subtract_spans([(1, last)], [*present, *log.holes]),
        holes=subtract_spans(log.holes, present),
        misplaced=[step for step, (first, _) in ranges.items() if step - 1 in ranges and ranges[step - 1][1] != first],
        misdivided=find_misdivided(records),
    )


def find_misdivided(records: Sequence[Event]) -> list[int]:
    """Return the steps whose shares are not those of a whole global batch, also of records that do not stand."""
    steps = [record for record in records if is_step(record.get("step"))]
    if not any("shares" in record for record in steps):
        return []
    return sorted({record["step"] for record in steps if not _adds_up(record)})


def _adds_up(record: Event) -> bool:
    match record:
        case {"shares": [*parts], "members": [*members], "samples": [int(first), int(end)]}:
            is_whole = all(is_step(part) and part > 0 for part in parts)
            return is_whole and len(parts) == len(members) and sum(parts) == end - first
    return False


class Commit(NamedTuple):
    line: int
    step: int
    samples: Range
    generation: Ballot


class Abandonment(NamedTuple):
    lineage: Ballot  # the abandoned lineage
    standing: Ballot  # the lineage that it was abandoned for
    after: int  # the last step that both surely share


@dataclass
class LineageLog:
    """What one lineage committed, in order."""

    lineage: Ballot
    commits: list[Commit] = field(default_factory=list)

    @property
    def steps(self) -> Range:
        return min(commit.step for commit in self.commits), max(commit.step for commit in self.commits)

    @property
    def lines(self) -> Range:
        return min(commit.line for commit in self.commits), max(commit.line for commit in self.commits)

    def remove(self, is_void: Callable[[int], bool]) -> int:
        """Remove the commits of void steps and return their number."""
        kept = [commit for commit in self.commits if not is_void(commit.step)]
        removed, self.commits = len(self.commits) - len(kept), kept
        return removed


@dataclass
class CommitLog:
    branches: list[LineageLog] = field(default_factory=list)
    abandonments: list[Abandonment] = field(default_factory=list)
    generations: set[Ballot] = field(default_factory=set)
    holes: list[Range] = field(default_factory=list)  # steps (first, last) that a resumed run recorded as lost
    unreadable: int = 0


def read_commit_log(records: Iterable[Event]) -> CommitLog:
    """Sort the records by lineage.

    Two ranks of one folder may write at the same time, and a joining rank copies lines that others wrote. So within a
    lineage only generations and steps give the order. Between lineages the line numbers show whether one followed the
    other or both ran at once.
    """
    log = CommitLog()
    open_branches: dict[Ballot, LineageLog] = {}
    seen: set[tuple[int, Ballot, Range]] = set()
    for line, record in enumerate(records):
        if "hole" in record and (hole := _parse_range(record["hole"])) is not None:
            log.holes.append(hole)
            continue
        parsed = _parse_abandonment(record) if "abandoned" in record else _parse_commit(line, record)
        match parsed:
            case None:
                log.unreadable += 1
            case Abandonment():
                log.abandonments.append(parsed)
            case commit, lineage:
                # A generation only trains forwards: the same step of it is the same step. Launches without membership
                # share one name (NEVER), and a step that they record again was really trained again.
                key = (commit.step, commit.generation, commit.samples)
                if commit.generation != NEVER and key in seen:
                    continue
                seen.add(key)
                log.generations.add(commit.generation)
                # Lines of launches without membership are one lineage only while no other lineage writes in between.
                if lineage != NEVER:
                    open_branches.pop(NEVER, None)
                if lineage not in open_branches:
                    open_branches[lineage] = LineageLog(lineage)
                    log.branches.append(open_branches[lineage])
                open_branches[lineage].commits.append(commit)
    for branch in log.branches:
        if branch.lineage != NEVER:
            branch.commits.sort(key=lambda commit: (commit.generation, commit.step, commit.line))
    return log


def _parse_commit(line: int, record: Event) -> tuple[Commit, Ballot] | None:
    step, samples = record.get("step"), _parse_range(record.get("samples"))
    generation, lineage = read_ballot(record.get("generation")), read_ballot(record.get("lineage"))
    if not is_step(step) or samples is None or generation is None or lineage is None:
        return None
    return Commit(line, step, samples, generation), lineage


def _parse_abandonment(record: Event) -> Abandonment | None:
    lineage, standing = read_ballot(record["abandoned"]), read_ballot(record.get("standing"))
    after = record.get("after")
    if lineage is None or standing is None or not is_step(after):
        return None
    return Abandonment(lineage, standing, after)


def _parse_range(value: Any) -> Range | None:
    if not (isinstance(value, list) and len(value) == 2 and all(is_step(position) for position in value)):
        return None
    first, end = value
    return (first, end) if first <= end else None


def _sort_by_line(log: CommitLog) -> list[LineageLog]:
    return sorted((branch for branch in log.branches if branch.commits), key=lambda branch: branch.lines)


def _drop_abandoned(log: CommitLog, abandonment: Abandonment) -> int:
    """Remove the commits of an abandoned lineage and return their number.

    The standing lineage may have parted a step after the last one that both surely shared. Steps that it was built on
    and that no other lineage recorded stay.
    """
    others = [branch for branch in log.branches if branch.lineage != abandonment.lineage]
    heirs = [branch for branch in others if branch.lineage == abandonment.standing and branch.commits]
    is_older = abandonment.lineage.number < abandonment.standing.number
    first_step = min((branch.steps[0] for branch in heirs), default=0) if is_older else 0
    recorded = {commit.step for branch in others for commit in branch.commits}

    def is_void(step: int) -> bool:
        return step > abandonment.after and (step >= first_step or step in recorded)

    return sum(branch.remove(is_void) for branch in log.branches if branch.lineage == abandonment.lineage)


def _resolve_forks(log: CommitLog) -> list[ForkedSteps]:
    """Return every fork and keep only its longer branch, so that gaps and overlaps are judged as if that one stood."""
    forks = []
    for earlier, later, first in _find_concurrent(log):
        last = min(earlier.steps[1], later.steps[1])
        forks.append(ForkedSteps(lineages=(str(earlier.lineage), str(later.lineage)), first=first, last=last))
        shorter = later if later.steps[1] <= earlier.steps[1] else earlier
        shorter.remove(first.__le__)
    return forks


def _find_concurrent(log: CommitLog) -> Iterator[tuple[LineageLog, LineageLog, int]]:
    """Yield pairs of lineages that trained the same steps at the same time, and the first of these steps.

    A launch that resumes a run writes only after the last line of the launch before it, so it is not a fork.
    """
    standing = _sort_by_line(log)
    for place, later in enumerate(standing):
        for earlier in standing[:place]:
            if not (earlier.commits and later.commits) or earlier.lines[1] < later.lines[0]:
                continue
            first = max(earlier.steps[0], later.steps[0])
            if first <= min(earlier.steps[1], later.steps[1]):
                yield earlier, later, first


def find_gaps_and_overlaps(ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """Return the positions between the ranges, counted from 0, and the positions that more than one range holds."""
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

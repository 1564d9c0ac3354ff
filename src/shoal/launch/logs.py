"""The logs of all ranks as one: whole lines only, in the order in which they were written."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.agent.rank_processes import times_of
from shoal.events import LineTail
from shoal.run_folder import RunFolder

_BAR_EVERY_S = 5.0
_LOG = re.compile(r"(?:rank-(\d+)|torchrun|spawn)\.log")


@dataclass(frozen=True)
class LogLine:
    """`rank` is None where one process speaks for all ranks of a node. `time` is on the launcher's clock."""

    time: float
    rank: int | None
    node: str
    text: str


class LogFollower:
    """Finds logs as they appear, and reads on where it stood.

    `shows_current`: the reader asks for the unfinished lines by `current`. Otherwise the state of a progress bar comes
    as a line of its own every few seconds."""

    def __init__(
        self, run: RunFolder, rank: int | None = None, only_new: bool = False, shows_current: bool = False
    ) -> None:
        self._folder = run.path / "logs"
        self._shows_current = shows_current
        self._rank = rank
        self._logs: dict[Path, _Log] = {}
        if only_new:
            self._find(skip=True)

    def poll(self) -> list[LogLine]:
        """What is new, in order. Lines of one rank keep theirs; between ranks it is good to a twentieth of a second."""
        self._find()
        return sorted((line for log in self._logs.values() for line in log.poll()), key=lambda line: line.time)

    def current(self) -> list[LogLine]:
        """The line of each rank that has no end yet, such as a progress bar, as it is now. `poll` before."""
        found = (log.current() for log in self._logs.values())
        return sorted((line for line in found if line is not None), key=lambda line: (line.rank or 0, line.node))

    def last_words(self) -> list[LogLine]:
        """What writers that have ended left without a line's end."""
        return [line for log in self._logs.values() for line in log.last_words()]

    def _find(self, skip: bool = False) -> None:
        for path in sorted(self._folder.glob("*/*.log")):
            match = _LOG.fullmatch(path.name)
            if match is None or path in self._logs:
                continue
            rank = None if match[1] is None else int(match[1])
            if self._rank is None or rank == self._rank:
                self._logs[path] = _Log(path, rank, skip, self._shows_current)


class _Log:
    def __init__(self, path: Path, rank: int | None, skip: bool, shows_current: bool) -> None:
        self._shows_current = shows_current
        self._lines = LineTail(path, overwrites=True)
        self._times = LineTail(times_of(path))
        self._rank = rank
        self._node = path.parent.name
        self._notes: deque[tuple[float, int]] = deque()
        self._shown_at = time.monotonic()
        self._shown = ""
        if skip:
            self._lines.skip_to_end()

    def poll(self) -> Iterable[LogLine]:
        for line, end in self._lines.poll_bytes():
            self._shown_at, self._shown = time.monotonic(), ""
            yield self._line(line.decode(errors="replace"), end)
        yield from self._progress()

    def last_words(self) -> Iterable[LogLine]:
        yield from self.poll()
        if words := self._lines.last_words():
            yield self._line(words, self._lines.offset)

    def current(self) -> LogLine | None:
        text = self._lines.last_words()
        return LogLine(math.inf, self._rank, self._node, text) if text.strip() else None

    def _progress(self) -> Iterable[LogLine]:
        """A progress bar has no end of line for hours: its newest state is shown now and then."""
        if self._shows_current:
            return
        if self._lines.is_overwritten and time.monotonic() - self._shown_at >= _BAR_EVERY_S:
            text = self._lines.last_words()
            if text and text != self._shown:
                self._shown_at, self._shown = time.monotonic(), text
                yield self._line(text, self._lines.offset)

    def _line(self, text: str, end: int) -> LogLine:
        return LogLine(self._time_of(end), self._rank, self._node, text)

    def _time_of(self, offset: int) -> float:
        """The first note that covers the offset. The newest lines may have none yet: they are later than all others."""
        while self._notes and self._notes[0][1] < offset:
            self._notes.popleft()
        if not self._notes:
            fresh = _read_notes(self._times.poll())
            self._notes.extend(note for note in fresh if note[1] >= offset)
        return self._notes[0][0] if self._notes else math.inf


def _read_notes(lines: Iterable[str]) -> Iterator[tuple[float, int]]:
    for line in lines:
        # A full disk may have cut one short.
        with contextlib.suppress(ValueError):
            when, size = line.split()
            yield float(when), int(size)

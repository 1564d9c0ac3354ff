"""Follows the logs of all ranks as one stream of whole lines, in the order in which they were written."""

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
    time: float  # on the launcher's clock; infinite where it is not known yet
    rank: int | None  # None where one process prints for all ranks of a node
    node: str
    text: str


class LogFollower:
    """Finds logs as they appear, and returns the lines that are new since the last poll.

    With `shows_current` the reader asks for unfinished lines by `current`. Otherwise the state of a progress bar is
    returned as a line of its own every few seconds.
    """

    def __init__(
        self, run: RunFolder, rank: int | None = None, only_new: bool = False, shows_current: bool = False
    ) -> None:
        self._folder = run.path / "logs"
        self._shows_current = shows_current
        self._rank = rank
        self._logs: dict[Path, _Log] = {}
        if only_new:
            self._find_logs(skip=True)

    def poll(self) -> list[LogLine]:
        """Return new lines in order. Lines of one rank keep their order; between ranks it is exact to 50 ms."""
        self._find_logs()
        return sorted((line for log in self._logs.values() for line in log.poll()), key=lambda line: line.time)

    def current(self) -> list[LogLine]:
        """Return the unfinished line of each rank, such as a progress bar. Call `poll` first."""
        lines = [line for log in self._logs.values() if (line := log.current()) is not None]
        return sorted(lines, key=lambda line: (line.rank or 0, line.node))

    def last_words(self) -> list[LogLine]:
        """Return the remaining lines of ended writers, including one without a newline."""
        return [line for log in self._logs.values() for line in log.drain()]

    def _find_logs(self, skip: bool = False) -> None:
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
        # When the log had reached which size.
        self._notes: deque[tuple[float, int]] = deque()
        self._shown_at = time.monotonic()
        self._shown = ""
        if skip:
            self._lines.skip_to_end()

    def poll(self) -> Iterable[LogLine]:
        for line, end in self._lines.poll_bytes():
            self._shown_at, self._shown = time.monotonic(), ""
            yield self._line(line.decode(errors="replace"), end)
        # A progress bar may print no newline for hours: its newest state is shown now and then.
        is_due = time.monotonic() - self._shown_at >= _BAR_EVERY_S
        if is_due and self._lines.is_overwritten and not self._shows_current:
            text = self._lines.unfinished_line()
            if text and text != self._shown:
                self._shown_at, self._shown = time.monotonic(), text
                yield self._line(text, self._lines.offset)

    def drain(self) -> Iterable[LogLine]:
        yield from self.poll()
        if text := self._lines.unfinished_line():
            yield self._line(text, self._lines.offset)

    def current(self) -> LogLine | None:
        text = self._lines.unfinished_line()
        return LogLine(math.inf, self._rank, self._node, text) if text.strip() else None

    def _line(self, text: str, end: int) -> LogLine:
        return LogLine(self._time_of(end), self._rank, self._node, text)

    def _time_of(self, offset: int) -> float:
        """Return the time of the first note that covers the offset. The newest lines may have none yet: they come
        last."""
        while self._notes and self._notes[0][1] < offset:
            self._notes.popleft()
        if not self._notes:
            self._notes.extend(note for note in _read_notes(self._times.poll()) if note[1] >= offset)
        return self._notes[0][0] if self._notes else math.inf


def _read_notes(lines: Iterable[str]) -> Iterator[tuple[float, int]]:
    for line in lines:
        # A full disk may have cut a line short.
        with contextlib.suppress(ValueError):
            when, size = line.split()
            yield float(when), int(size)

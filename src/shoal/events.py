"""Events: one JSON line each, appended by one process to a file of its own.

A line is one `write` on a descriptor opened for appending, so a reader never sees half of one from a live writer; a
process killed in mid-write may leave a torn last line, and `read_events` passes over it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """The one writer of one event file.

    A full or vanished disk must not end a training that could still checkpoint elsewhere: a failed append is reported
    once on stderr and the event is dropped. `private`: only its owner can read the file, from its first moment on.
    """

    def __init__(self, path: Path, rank: int, private: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._rank = rank
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600 if private else 0o644)
        if private:
            # One that was there before, and whose mode was changed.
            os.fchmod(self._fd, 0o600)
        self._complained = False
        self._end_torn_line()

    def write(self, event: str, **fields: Any) -> None:
        record = {"event": event, "rank": self._rank, "time": round(time.time(), 6), **fields}
        self.append(record)

    def append(self, record: Event) -> None:
        self._put((json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)

    def _put(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except OSError as error:
            self._complain(error)

    def _end_torn_line(self) -> None:
        """A resumed run appends to the file of a killed one: its half line must not swallow our first."""
        size = os.fstat(self._fd).st_size
        if not size:
            return
        with self.path.open("rb") as file:
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
        if torn:
            self._put(b"\n")

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"shoal: cannot write {self.path}: {error.strerror}; events are lost from here on\n")


def read_events(path: Path) -> Iterator[Event]:
    """Every whole record of a file, in order; a torn or foreign line is passed over."""
    with path.open("rb") as file:
        for line in file:
            record = parse_event(line)
            if record is not None:
                yield record


def read_last_events(path: Path, most_bytes: int) -> list[Event]:
    """Those whole records that stand in the last bytes of a file, which may be long; none where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class LineTail:
    """Reads the whole lines that were appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip_to_end(self) -> None:
        """A resumed run appends to old files: only what comes now is news."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def poll(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.poll_bytes()]

    def poll_bytes(self) -> list[bytes]:
        block = self._unread()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.split(b"\n")[:-1]

    def last_words(self) -> str:
        """What a writer that has ended left without a line's end."""
        return self._unread().decode(errors="replace")

    def _unread(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return b""


class EventTail:
    """Reads the events that were appended since the last look; for live displays."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def skip_to_end(self) -> None:
        self._lines.skip_to_end()

    def poll(self) -> list[Event]:
        return [event for line in self._lines.poll_bytes() if (event := parse_event(line)) is not None]

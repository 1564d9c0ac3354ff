"""Events: one JSON line each, appended by one process to a file of its own.

A line is one `write` on a descriptor opened for appending, so a reader never sees half of one from a live writer; a
process killed in mid-write may leave a torn last line, and `read_events` passes over it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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

    def is_removed(self) -> bool:
        """Whether the file was deleted or replaced: what is written now, no reader will find."""
        try:
            there, own = self.path.stat(), os.fstat(self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

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
    """Every whole record of a file, in order; what `parse_event` refuses is passed over."""
    schema, cutter = schema_of(path), LineCutter(LONGEST_EVENT)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            for line, _ in cutter.feed(block):
                if (event := parse_event(line, schema)) is not None:
                    yield event
    if (event := parse_event(cutter.rest(), schema)) is not None:
        yield event


def read_last_events(path: Path, most_bytes: int) -> list[Event]:
    """Those whole records that stand in the last bytes of a file, which may be long; none where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    schema = schema_of(path)
    return [event for line in lines if (event := parse_event(line, schema)) is not None]


Check = Callable[[object], bool]
# What a field may hold. JSON has numbers without bounds; beyond these, conversions and formats of Python raise.
_LARGEST = 2**63


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number(value: object) -> bool:
    """NaN and infinity included: a loss may be either."""
    return isinstance(value, float) or _is_int(value)


def _is_finite(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_positive(value: object) -> bool:
    return _is_finite(value) and value > 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


# For each kind of event the fields that readers use without asking. Other fields may be missing or of any type.
Schema = Mapping[str, Mapping[str, Check]]

_ALWAYS: Mapping[str, Check] = {"event": _is_text, "rank": _or_none(_is_int), "time": _or_none(_is_finite)}

RANK_EVENTS: Schema = {
    "step": {"step": _is_int, "step_s": _is_positive, "loss": _is_number, "tokens": _is_finite},
    "start": {
        "world_size": _is_int,
        "params": _is_int,
        "threads": _is_int,
        "tokens_per_step": _is_int,
        "micro_batch": _is_int,
        "device": _is_text,
        "backend": _is_text,
        "resumed_from": _or_none(_is_int),
    },
    "shard": {"size": _is_int, "total": _is_int, "first": _is_text},
    "choice": {"step": _is_int, "why": _is_text},
    "eval": {"step": _is_int, "val_loss": _is_number},
    "note": {"text": _is_text},
    "warning": {"seen": _is_text, "fix": _is_text},
    "fault": {"seen": _is_text},
    "digest": {"sha256": _is_text},
    "doing": {"text": _is_text},
}
AGENT_EVENTS: Schema = {
    "ready": {
        "mark": _is_text,
        "port": _is_int,
        "script_port": _or_none(_is_int),
        "interface": _or_none(_is_text),
        "cores": _is_int,
        "cpu_only": _is_bool,
        "life": _is_int,
        "highest": _is_int,
    },
    "ended": {"name": _is_text, "code": _is_int, "by_us": _is_bool, "starved": _is_bool},
    "restart": {"name": _is_text},
    "note": {"text": _is_text},
    "tell": {"text": _is_text, "generation": _or_none(_is_text)},
    "pause": {"text": _is_text, "generation": _or_none(_is_text)},
    "abandon": {"text": _is_text, "generation": _or_none(_is_text)},
    "broken": {"name": _is_text, "why": _is_text},
    "lost": {"node": _is_text, "how": _is_text},
    "peer": {"node": _is_text, "failed": _is_bool},
    "generation": {"members": _is_texts},
    "refused": {"seen": _is_text},
    "gave-up": {"seen": _is_text},
}
KEEPER_EVENTS: Schema = {"ended": {"code": _is_int}, "note": {"text": _is_text}}


def schema_of(path: Path) -> Schema | None:
    """By the file's place in a run folder, so that no reader can forget it. None: any JSON object is a record."""
    if path.name == "keeper.jsonl":
        return KEEPER_EVENTS
    return {"events": RANK_EVENTS, "agents": AGENT_EVENTS}.get(path.parent.name)


def parse_event(line: bytes, schema: Schema | None = None) -> Event | None:
    """None for half a line, for what is no JSON object, and for an event without a field that its readers need.

    A run folder may hold anything: a killed writer, a full disk, another version, another machine. Checked here,
    readers can use the fields of `schema` as they are.
    """
    try:
        record = json.loads(line)
        if b"\\u" in line:
            # Half of a surrogate pair is valid JSON, and cannot be printed.
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return record if schema is None or _fits(record, schema) else None


def _fits(record: Event, schema: Schema) -> bool:
    if not all(check(record.get(name)) for name, check in _ALWAYS.items()):
        return False
    if schema is RANK_EVENTS and record.get("rank") is None:
        return False
    return all(check(record.get(name)) for name, check in schema.get(record["event"], {}).items())


class LineCutter:
    """Cuts a stream into lines, in time linear in its length and with at most `most_bytes` of one line in memory.

    A longer line is cut there, and says so. `overwrites`: a carriage return goes back to the line's start, as on a
    terminal; of a progress bar the newest state is kept, not all of them.
    """

    def __init__(self, most_bytes: int, overwrites: bool = False) -> None:
        self._most = most_bytes
        self._overwrites = overwrites
        self._rest = bytearray()
        # Bytes of the unfinished line: all that came, and those that were not kept because it is too long.
        self._length = 0
        self._cut = 0
        self._returned = False
        self.is_overwritten = False

    @property
    def pending_bytes(self) -> int:
        return self._length

    def feed(self, block: bytes) -> list[tuple[bytes, int]]:
        """The lines that end in this block, without their end, and how many bytes of the stream each took with it."""
        *whole, rest = block.split(b"\n")
        lines = []
        for number, part in enumerate(whole):
            if number == 0 or (self._overwrites and b"\r" in part) or len(part) > self._most:
                self._hold(part)
                lines.append((self.rest(), self._length + 1))
                self._clear()
            else:
                lines.append((part, len(part) + 1))
        self._hold(rest)
        return lines

    def rest(self) -> bytes:
        """The line that has no end yet."""
        kept = bytes(self._rest)
        return kept + f" … [{self._cut:,} more bytes of this line are not shown]".encode() if self._cut else kept

    def _hold(self, part: bytes) -> None:
        self._length += len(part)
        if self._overwrites and part:
            text = part.rstrip(b"\r")
            _, went_back, newest = text.rpartition(b"\r")
            if text and (went_back or self._returned):
                self._rest.clear()
                self._cut = 0
                self.is_overwritten = True
            # What follows a carriage return overwrites the line; a line's end does not.
            self._returned = len(text) < len(part) or (self._returned and not text)
            part = newest
        room = self._most - len(self._rest)
        self._rest += part[:room]
        self._cut += max(0, len(part) - room)

    def _clear(self) -> None:
        self._rest.clear()
        self._length = self._cut = 0
        self._returned = self.is_overwritten = False


_BLOCK = 1 << 20
# Of what a rank prints; nobody reads more of one line.
LONGEST_LINE = 1 << 20
# Of an event; ours have some kilobytes.
LONGEST_EVENT = 16 << 20


class LineTail:
    """Reads the lines that were appended to a file since the last look. Every byte is read once."""

    def __init__(self, path: Path, most_bytes: int = LONGEST_LINE, overwrites: bool = False) -> None:
        self._path = path
        self._offset = 0
        self._cutter = LineCutter(most_bytes, overwrites)

    @property
    def offset(self) -> int:
        """How far it has read."""
        return self._offset

    @property
    def is_overwritten(self) -> bool:
        """Whether the unfinished line is one that is written over and over, such as a progress bar."""
        return self._cutter.is_overwritten

    def skip_to_end(self) -> None:
        """A resumed run appends to old files: only what comes now is news."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def poll(self) -> list[str]:
        return [line.decode(errors="replace") for line, _ in self.poll_bytes()]

    def poll_bytes(self) -> list[tuple[bytes, int]]:
        """Whole lines, each with the place in the file where the next one begins."""
        lines = []
        for block in self._unread():
            place = self._offset - self._cutter.pending_bytes
            self._offset += len(block)
            for line, took in self._cutter.feed(block):
                place += took
                lines.append((line, place))
        return lines

    def last_words(self) -> str:
        """What a writer that has ended left without a line's end. `poll` before: whole lines are not in it."""
        return self._cutter.rest().decode(errors="replace")

    def _unread(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while block := file.read(_BLOCK):
                    yield block
        except (FileNotFoundError, NotADirectoryError):
            return


class EventTail:
    """Reads the events that were appended since the last look; for live displays."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path, LONGEST_EVENT)
        self._schema = schema_of(path)
        # Lines that were no event, so far.
        self.unreadable = 0

    def skip_to_end(self) -> None:
        self._lines.skip_to_end()

    def poll(self) -> list[Event]:
        events = []
        for line, _ in self._lines.poll_bytes():
            if (event := parse_event(line, self._schema)) is not None:
                events.append(event)
            elif line:
                self.unreadable += 1
        return events

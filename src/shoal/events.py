"""Events: one JSON line each, appended by one process to a file of its own.

A line is one `write` on a descriptor opened for appending, so a reader never sees half of one from a live writer. A
process killed in mid-write, or a power cut, may leave a torn last line: `read_events` passes over it, and the next
writer of the file cuts it off. A line that cannot be written is kept in memory and written later.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]

# Lines kept while a file cannot be written: some 15 MB of a ledger, 40 MB of a rank's events. At ten steps a second
# that is nearly three hours of a full disk.
MOST_KEPT = 100_000
# How long a process tries at its end, over all its files, before it gives up.
FLUSH_S = 5.0
_RETRY_S = 0.2
_BLOCK_BYTES = 1 << 18
# A reader of a live file may see half of a line for a moment: only what stays torn is cut off.
_TORN_S = 0.05
# How long a writer waits for another process that repairs the end of the same file, and that one for writers. A
# process may be frozen while it holds the lock, so nothing waits longer.
_LOCK_S = 0.2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _DiskWait:
    """Seconds that this process may still wait for disks: ten files on a full disk must not add up to a minute."""

    left_s = FLUSH_S


_patience = _DiskWait()
# Logs with lines that wait to be written: a process that ends without closing them still tries.
_waiting: set[EventLog] = set()


def to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"shoal: {text}\n")


class EventLog:
    """Appends records to one file, in order.

    A full disk must not end a training, and must not lose a line either. A line that cannot be written is kept (at most
    `most_kept`, then the oldest are dropped) and written before the next one. `tell` gets a sentence when writing
    fails and another one when it works again. `private`: only its owner can read the file, from its first moment on.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        tell: Callable[[str], None] = to_stderr,
        most_kept: int = MOST_KEPT,
        private: bool = False,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._lock = threading.RLock()
        self._delayed = 0
        self._rank = rank
        self._tell = tell
        self._most_kept = most_kept
        self._private = private
        self._kept: deque[bytes] = deque()
        self._failed: OSError | None = None
        self._fd: int | None = None
        # Bytes of half a line that are in the file and could not be cut off.
        self._is_torn = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._fail(error)

    def write(self, event: str, **fields: Any) -> None:
        record = {"event": event, "rank": self._rank, "time": round(time.time(), 6), **fields}
        self.append(record)

    def append(self, record: Event) -> None:
        line = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
        with self._lock:
            self._kept.append(line)
            if not self.retry():
                self._delayed += 1

    def retry(self) -> bool:
        """Writes what was kept, if that can be done now; whether nothing is left to write."""
        if not self._kept and self._failed is None:
            return True
        with self._lock:
            return self._write_kept()

    @property
    def kept(self) -> int:
        """Lines that wait to be written."""
        return len(self._kept)

    @property
    def missing(self) -> int:
        """Lines that are not in the file and should be."""
        return len(self._kept) + self.dropped

    def kept_events(self) -> list[Event]:
        """The records that wait to be written."""
        with self._lock:
            return [json.loads(line) for line in self._kept]

    def drop_kept(self, is_needless: Callable[[Event], bool]) -> None:
        """Of the records that wait to be written, those that another process writes, or that became untrue."""
        with self._lock:
            self._kept = deque(line for line in self._kept if not is_needless(json.loads(line)))

    def flush(self, timeout_s: float = FLUSH_S) -> int:
        """Tries for a while to write what was kept; returns how many lines are missing from the file."""
        timeout_s = min(timeout_s, _patience.left_s)
        began = time.monotonic()
        while not self.retry() and time.monotonic() - began < timeout_s:
            time.sleep(_RETRY_S)
        _patience.left_s = FLUSH_S if not self._kept else _patience.left_s - (time.monotonic() - began)
        return self.missing

    def sync(self) -> None:
        """Returns when the file, and its name in the folder, would survive a power cut; raises OSError otherwise."""
        if not self.retry():
            raise self._failed or OSError(errno.EIO, "lines are not written yet", str(self.path))
        if self._fd is not None:
            os.fsync(self._fd)
            sync_path(self.path.parent)

    def cut_torn_line(self) -> None:
        """Removes half a line at the end of the file, which another process left when it was killed. A record that
        lacks nothing but the line's end gets it.

        Cut off instead of ended by a line's end: `shoal verify` counts lines that cannot be read. Writers of the same
        file wait meanwhile: a line that came in between would be cut off with it.
        """
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            size, torn = _torn_end(self.path)
            if torn:
                time.sleep(_TORN_S)
                with _locked(self._fd, fcntl.LOCK_EX) as is_locked:
                    if is_locked and _torn_end(self.path) == (size, torn):
                        self._mend_end(size - torn)

    def close(self) -> None:
        """Tries for a while to write what was kept, and says what is lost otherwise."""
        self.flush()
        _waiting.discard(self)
        if self.missing:
            self._tell(f"{self.path} lacks {self.missing} lines that could not be written: {_reason(self._failed)}")
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_removed(self) -> bool:
        """Whether the file was deleted or replaced: what is written now, no reader will find."""
        if self._fd is None:
            return False
        try:
            there, own = self.path.stat(), os.fstat(self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600 if self._private else 0o644)
        if self._private:
            # One that was there before, and whose mode was changed.
            os.fchmod(self._fd, 0o600)
        self.cut_torn_line()

    def _mend_end(self, whole: int) -> None:
        """Of a file whose last line begins at `whole` and has no end."""
        assert self._fd is not None  # noqa: S101 - the caller has locked it
        with self.path.open("rb") as file:
            file.seek(whole)
            is_record = parse_event(file.read()) is not None
        if is_record:
            os.write(self._fd, b"\n")
        else:
            os.ftruncate(self._fd, whole)

    def _write_kept(self) -> bool:
        """Whether nothing is left to write."""
        try:
            while self._kept:
                self._write_block()
        except OSError as error:
            self._fail(error)
            return False
        if self._failed is not None:
            self._failed, delayed = None, self._delayed
            self._delayed = 0
            _waiting.discard(self)
            lost = f"; {self.dropped:,} older ones are lost" if self.dropped else ""
            self._tell(
                f"writing {self.path} works again; {delayed - self.dropped:,} lines were kept and are written{lost}"
            )
        return True

    def _write_block(self) -> None:
        """As many of the kept lines as fit into one write; raises OSError where not all of them could be written."""
        if self._fd is None:
            self._open()
        assert self._fd is not None  # noqa: S101 - _open sets it or raises
        lines: list[bytes] = []
        size = 0
        for line in self._kept:
            if lines and size + len(line) > _BLOCK_BYTES:
                break
            lines.append(line)
            size += len(line)
        start = b"\n" if self._is_torn else b""
        with _locked(self._fd, fcntl.LOCK_SH):
            written = os.write(self._fd, start + b"".join(lines))
        if written >= len(start):
            self._is_torn = False
        left = max(0, written - len(start))
        for line in lines:
            if left < len(line):
                break
            left -= len(line)
            self._kept.popleft()
        if written < len(start) + size:
            # The disk took a part of the block: half a line must not stay in front of what comes next.
            if left:
                self._take_back(left)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _take_back(self, count: int) -> None:
        """Cuts off the bytes that were just written, unless another process has appended behind them."""
        assert self._fd is not None  # noqa: S101 - something was written
        self._is_torn = True
        with contextlib.suppress(OSError):
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            if os.fstat(self._fd).st_size == end:
                os.ftruncate(self._fd, end - count)
                self._is_torn = False

    def _fail(self, error: OSError) -> None:
        is_news, self._failed = self._failed is None, error
        _waiting.add(self)
        if is_news:
            self._tell(
                f"cannot write {self.path}: {_reason(error)}; its lines are kept in memory and written later, "
                f"up to {self._most_kept:,} of them"
            )
        while len(self._kept) > self._most_kept:
            self._kept.popleft()
            self.dropped += 1
            if self.dropped == 1:
                self._tell(f"{self.path} could not be written for too long: its oldest lines are dropped from now on")


@atexit.register
def _flush_waiting() -> None:
    for log in tuple(_waiting):
        log.close()


def _reason(error: OSError | None) -> str:
    return (error.strerror or str(error)) if error is not None else "unknown"


@contextlib.contextmanager
def _locked(fd: int, kind: int) -> Iterator[bool]:
    """Whether the file could be locked in a moment; where a file system has no locks, it could not."""
    until, is_locked = time.monotonic() + _LOCK_S, False
    while not is_locked:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        except OSError:
            break
    try:
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _torn_end(path: Path) -> tuple[int, int]:
    """The size of a file, and how many bytes stand behind its last line's end."""
    with path.open("rb") as file:
        size = position = file.seek(0, os.SEEK_END)
        while position:
            begin = max(0, position - _BLOCK_BYTES)
            file.seek(begin)
            place = file.read(position - begin).rfind(b"\n")
            if place >= 0:
                return size, size - (begin + place + 1)
            position = begin
        return size, size


def sync_path(path: Path) -> None:
    """Returns when the file's bytes, or the folder's names, would survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class FileMark:
    """How long an append-only file was at some moment, and the SHA-256 of these bytes."""

    size: int
    sha256: str


class FileMarker:
    """Marks a file that grows, reading each byte once however often it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0

    def mark(self) -> FileMark:
        """Of the whole lines that the file has now."""
        size, torn = _torn_end(self._path) if self._path.exists() else (0, 0)
        if size - torn < self._size:
            self._hash, self._size = hashlib.sha256(), 0
        if size - torn > self._size:
            with self._path.open("rb") as file:
                file.seek(self._size)
                while (left := size - torn - self._size) and (block := file.read(min(left, _BLOCK_BYTES))):
                    self._hash.update(block)
                    self._size += len(block)
        return FileMark(self._size, self._hash.hexdigest())


def has_mark(path: Path, mark: FileMark) -> bool:
    """Whether the file still begins with the bytes that were marked."""
    value, left = hashlib.sha256(), mark.size
    try:
        with path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                value.update(block)
                left -= len(block)
    except FileNotFoundError:
        return mark.size == 0
    return not left and value.hexdigest() == mark.sha256


@dataclass
class Unreadable:
    """Counts the lines of a file that are no records."""

    lines: int = 0


def read_events(path: Path, unreadable: Unreadable | None = None) -> Iterator[Event]:
    """Every whole record of a file, in order. What `parse_event` refuses is counted in `unreadable`."""
    schema = schema_of(path)
    for line in _read_lines(path):
        if (event := parse_event(line, schema)) is not None:
            yield event
        elif unreadable is not None:
            unreadable.lines += 1


def _read_lines(path: Path) -> Iterator[bytes]:
    cutter = LineCutter(LONGEST_EVENT)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            for line, _ in cutter.feed(block):
                yield line
    if rest := cutter.rest():
        yield rest


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


def _is_between(least: int, most: int) -> Check:
    return lambda value: _is_int(value) and least <= value <= most  # type: ignore[operator]


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(rank) and rank >= 0 for rank in value)


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
        "port": _is_between(0, 2**16 - 1),
        "script_port": _or_none(_is_between(0, 2**16 - 1)),
        "interface": _or_none(_is_text),
        "cores": _is_between(1, 2**16),
        "cpu_only": _is_bool,
        "life": _is_between(0, 2**31),
        "highest": _is_between(0, 2**53),
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
    "refused": {"seen": _is_text, "why": _or_none(_is_text), "fix": _or_none(_is_text)},
    "met": {"met": _is_ranks, "missing": _is_ranks, "after_s": _is_finite},
    "meeting": {"keys": _or_none(_is_int)},
    "gave-up": {"seen": _is_text, "why": _or_none(_is_text), "fix": _or_none(_is_text)},
}
SUPERVISOR_EVENTS: Schema = {"ended": {"code": _is_int}, "note": {"text": _is_text}}


def schema_of(path: Path) -> Schema | None:
    """By the file's place in a run folder, so that no reader can forget it. None: any JSON object is a record."""
    if path.name == "supervisor.jsonl":
        return SUPERVISOR_EVENTS
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
    """Whether its readers can use a record. A field that may be None is there afterwards."""
    if not _has(record, _ALWAYS) or (schema is RANK_EVENTS and record["rank"] is None):
        return False
    return _has(record, schema.get(record["event"], {}))


def _has(record: Event, fields: Mapping[str, Check]) -> bool:
    return all(check(record.setdefault(name, None)) for name, check in fields.items())


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


# Of a line that a rank prints.
LONGEST_LINE = 1 << 20
# Of an event; ours have some kilobytes.
LONGEST_EVENT = 16 << 20
# Of an unfinished line: a longer one is not read again to see whether it is still there.
_COMPARED_BYTES = 1 << 16


class LineTail:
    """Reads the lines that were appended to a file since the last look. Every byte is read once."""

    def __init__(self, path: Path, most_bytes: int = LONGEST_LINE, overwrites: bool = False) -> None:
        self._path = path
        self._offset = 0
        self._most_bytes = most_bytes
        self._overwrites = overwrites
        self._cutter = LineCutter(most_bytes, overwrites)
        # The unfinished line as it stands in the file, as far as it is compared.
        self._unfinished = b""

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
        size, torn = _torn_end(self._path) if self._path.exists() else (0, 0)
        # The next writer cuts half a line off: its first line begins where that began.
        self._offset = size - torn

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
            if self._cutter.pending_bytes <= _COMPARED_BYTES:
                self._unfinished = (self._unfinished + block).rpartition(b"\n")[2]
        return lines

    def last_words(self) -> str:
        """What a writer that has ended left without a line's end. `poll` before: whole lines are not in it."""
        return self._cutter.rest().decode(errors="replace")

    def _unread(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                self._forget_cut_line(file)
                file.seek(self._offset)
                while block := file.read(_BLOCK_BYTES):
                    yield block
        except (FileNotFoundError, NotADirectoryError):
            return

    def _forget_cut_line(self, file: IO[bytes]) -> None:
        """The next writer of a file cuts off the half line that a killed one left: go back to where that began."""
        pending = self._cutter.pending_bytes
        if not 0 < pending <= _COMPARED_BYTES:
            return
        file.seek(self._offset - pending)
        if file.read(pending) != self._unfinished:
            self._offset -= pending
            self._cutter = LineCutter(self._most_bytes, self._overwrites)
            self._unfinished = b""


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

"""Event files: JSON lines, each appended by one `write`, and readers that follow them.

Every process appends to a file of its own. A line is one `write` on a descriptor opened for appending, so a reader
never sees half of a line from a live writer. A process killed in mid-write, or a power cut, may leave a torn last line:
readers skip it, and the next writer of the file removes it. A line that cannot be written, as on a full disk, is kept
in memory and written later.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Nearly all users of these files need the type too.
from shoal.event_schema import Event as Event
from shoal.event_schema import parse_event, schema_of

# Lines kept while a file cannot be written: about 15 MB of a ledger, 40 MB of a rank's events. At ten steps per second
# that is nearly three hours of a full disk.
MOST_KEPT = 100_000
# How long a process tries at its end, over all its files, to write the kept lines.
FLUSH_S = 5.0
_RETRY_S = 0.2
_BLOCK_BYTES = 1 << 18
# A reader of a live file may see half of a line for a moment. Only a line that stays torn this long is cut off.
_TORN_S = 0.05
# How long a writer waits for a process that repairs the end of the same file, and vice versa. A process may be frozen
# while it holds the lock, so no process waits longer.
_LOCK_S = 0.2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _FlushBudget:
    """Seconds that this process may still wait for disks: ten files on a full disk must not add up to a minute."""

    left_s = FLUSH_S


# Logs with unwritten lines. A process that ends without closing them flushes them at exit.
_unwritten: set[EventLog] = set()


def to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"shoal: {text}\n")


class EventLog:
    """Appends records to one file, in order.

    A full disk must neither end a training nor lose a line. A line that cannot be written is kept and written before
    the next one; above `most_kept` lines the oldest are dropped. `warn` receives a sentence when writing fails and
    another one when it works again. A `private` file is readable by its owner only, from its creation on.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        warn: Callable[[str], None] = to_stderr,
        most_kept: int = MOST_KEPT,
        private: bool = False,
    ) -> None:
        self.path = path
        self.dropped = 0
        # Reentrant: `warn` may append to this log.
        self._lock = threading.RLock()
        self._delayed = 0
        self._rank = rank
        self._warn = warn
        self._most_kept = most_kept
        self._private = private
        self._kept: deque[bytes] = deque()
        self._error: OSError | None = None
        self._fd: int | None = None
        # Whether the file ends with half a line that could not be cut off.
        self._is_torn = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._fail(error)

    def write(self, event: str, /, **fields: Any) -> None:
        self.append({"event": event, "rank": self._rank, "time": round(time.time(), 6), **fields})

    def append(self, record: Event) -> None:
        line = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
        with self._lock:
            self._kept.append(line)
            if not self.retry():
                self._delayed += 1

    def retry(self) -> bool:
        """Try once to write the kept lines. Return whether none is left."""
        if not self._kept and self._error is None:
            return True
        with self._lock:
            try:
                while self._kept:
                    self._write_block()
            except OSError as error:
                self._fail(error)
                return False
            if self._error is not None:
                self._error, delayed = None, self._delayed
                self._delayed = 0
                _unwritten.discard(self)
                lost = f"; {self.dropped:,} older ones are lost" if self.dropped else ""
                self._warn(
                    f"writing {self.path} works again; {delayed - self.dropped:,} lines were kept and are written{lost}"
                )
            return True

    @property
    def kept(self) -> int:
        """The number of lines that wait to be written."""
        return len(self._kept)

    @property
    def missing(self) -> int:
        """The number of lines that should be in the file and are not."""
        return len(self._kept) + self.dropped

    def kept_events(self) -> list[Event]:
        with self._lock:
            return [json.loads(line) for line in self._kept]

    def drop_kept(self, is_needless: Callable[[Event], bool]) -> None:
        """Drop kept records that another process writes, or that are no longer true."""
        with self._lock:
            self._kept = deque(line for line in self._kept if not is_needless(json.loads(line)))

    def flush(self, timeout_s: float = FLUSH_S) -> int:
        """Try for a while to write the kept lines. Return how many lines are missing from the file."""
        timeout_s = min(timeout_s, _FlushBudget.left_s)
        began = time.monotonic()
        while not self.retry() and time.monotonic() - began < timeout_s:
            time.sleep(_RETRY_S)
        _FlushBudget.left_s = FLUSH_S if not self._kept else _FlushBudget.left_s - (time.monotonic() - began)
        return self.missing

    def sync(self) -> None:
        """Return once the file and its name in the folder would survive a power cut; raise OSError otherwise."""
        if not self.retry():
            raise self._error or OSError(errno.EIO, "lines are not written yet", str(self.path))
        if self._fd is not None:
            os.fsync(self._fd)
            sync_path(self.path.parent)

    def cut_torn_line(self) -> None:
        """Repair the end of a file whose writer was killed: cut off half a line, or end a record that is complete.

        Half a line is cut off rather than ended, because `shoal verify` counts unreadable lines. Other writers of the
        file wait meanwhile: a line appended in between would be cut off too.
        """
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            size, torn = _torn_end(self.path)
            if not torn:
                return
            time.sleep(_TORN_S)
            with _locked(self._fd, fcntl.LOCK_EX) as is_locked:
                if not is_locked or _torn_end(self.path) != (size, torn):
                    return
                with self.path.open("rb") as file:
                    file.seek(size - torn)
                    is_record = parse_event(file.read()) is not None
                if is_record:
                    os.write(self._fd, b"\n")
                else:
                    os.ftruncate(self._fd, size - torn)

    def close(self) -> None:
        """Flush, warn about lines that are lost, and close the file."""
        self.flush()
        _unwritten.discard(self)
        if self.missing:
            self._warn(f"{self.path} lacks {self.missing} lines that could not be written: {_reason(self._error)}")
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_removed(self) -> bool:
        """Return whether the file was deleted or replaced, so that no reader will see new lines."""
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
            # The file may have existed before with another mode.
            os.fchmod(self._fd, 0o600)
        self.cut_torn_line()

    def _write_block(self) -> None:
        """Write as many kept lines as fit into one block; raise OSError if not all of them could be written."""
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
            # The disk took a part of the block: half a line must not stay in front of the next one.
            if left:
                self._take_back(left)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _take_back(self, count: int) -> None:
        """Cut off the last written bytes, unless another process has appended behind them."""
        assert self._fd is not None  # noqa: S101 - something was written
        self._is_torn = True
        with contextlib.suppress(OSError):
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            if os.fstat(self._fd).st_size == end:
                os.ftruncate(self._fd, end - count)
                self._is_torn = False

    def _fail(self, error: OSError) -> None:
        is_first, self._error = self._error is None, error
        _unwritten.add(self)
        if is_first:
            self._warn(
                f"cannot write {self.path}: {_reason(error)}; its lines are kept in memory and written later, "
                f"up to {self._most_kept:,} of them"
            )
        while len(self._kept) > self._most_kept:
            self._kept.popleft()
            self.dropped += 1
            if self.dropped == 1:
                self._warn(f"{self.path} could not be written for too long: its oldest lines are dropped from now on")


@atexit.register
def _flush_unwritten() -> None:
    for log in tuple(_unwritten):
        log.close()


def _reason(error: OSError | None) -> str:
    return (error.strerror or str(error)) if error is not None else "unknown"


@contextlib.contextmanager
def _locked(fd: int, kind: int) -> Iterator[bool]:
    """Yield whether the file could be locked within `_LOCK_S`; False where the file system has no locks."""
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
    """Return the file's size and the number of bytes after its last newline; (0, 0) if there is no file."""
    if not path.exists():
        return 0, 0
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
    """Return once the file's bytes, or the folder's names, would survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class FileMark:
    """The length of an append-only file at some moment, and the SHA-256 of these bytes."""

    size: int
    sha256: str


class FileMarker:
    """Marks a growing file, reading each byte once however often it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0

    def mark(self) -> FileMark:
        """Return a mark of the whole lines that the file has now."""
        size, torn = _torn_end(self._path)
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
    """Return whether the file still begins with the marked bytes."""
    value, left = hashlib.sha256(), mark.size
    try:
        with path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                value.update(block)
                left -= len(block)
    except FileNotFoundError:
        return mark.size == 0
    return not left and value.hexdigest() == mark.sha256


# The longest kept part of a line that a rank prints, and of an event; shoal's own events have some kilobytes.
LONGEST_LINE = 1 << 20
LONGEST_EVENT = 16 << 20
# A longer unfinished line is not read again to see whether it is still in the file.
_COMPARED_BYTES = 1 << 16


def read_events(path: Path, skipped: Counter[str] | None = None) -> Iterator[Event]:
    """Yield every whole record of a file, in order, skipping lines that `parse_event` refuses.

    They are counted in `skipped`, by the file's name, half of a last line included.
    """
    schema, cutter = schema_of(path), LineCutter(LONGEST_EVENT)
    unreadable = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            for line, _ in cutter.feed(block):
                if (event := parse_event(line, schema)) is not None:
                    yield event
                elif line:
                    unreadable += 1
    if (event := parse_event(cutter.rest(), schema)) is not None:
        yield event
    elif cutter.rest():
        unreadable += 1
    if skipped is not None and unreadable:
        skipped[path.name] += unreadable


def read_last_events(path: Path, most_bytes: int) -> list[Event]:
    """Return the whole records in the last bytes of a file, which may be long; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    schema = schema_of(path)
    return [event for line in lines if (event := parse_event(line, schema)) is not None]


class LineCutter:
    """Cuts a stream into lines, in time linear in its length and with at most `most_bytes` of one line in memory.

    A longer line is cut, and a note is added to it. With `overwrites`, a carriage return goes back to the line's start,
    as on a terminal: of a progress bar only the newest state is kept.
    """

    def __init__(self, most_bytes: int, overwrites: bool = False) -> None:
        self._most_bytes = most_bytes
        self._overwrites = overwrites
        self._rest = bytearray()
        self._length = 0  # bytes received of the unfinished line
        self._cut = 0  # bytes of it that were not kept because it is too long
        self._returned = False
        self.is_overwritten = False

    @property
    def pending_bytes(self) -> int:
        return self._length

    def feed(self, block: bytes) -> list[tuple[bytes, int]]:
        """Return the lines that end in this block without their newline, each with its length in the stream."""
        *whole, rest = block.split(b"\n")
        lines = []
        for number, part in enumerate(whole):
            if number == 0 or (self._overwrites and b"\r" in part) or len(part) > self._most_bytes:
                self._hold(part)
                lines.append((self.rest(), self._length + 1))
                self._rest.clear()
                self._length = self._cut = 0
                self._returned = self.is_overwritten = False
            else:
                lines.append((part, len(part) + 1))
        self._hold(rest)
        return lines

    def rest(self) -> bytes:
        """Return the line that has no newline yet."""
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
            # Text after a carriage return overwrites the line; a newline after it does not.
            self._returned = len(text) < len(part) or (self._returned and not text)
            part = newest
        room = self._most_bytes - len(self._rest)
        self._rest += part[:room]
        self._cut += max(0, len(part) - room)


class LineTail:
    """Reads the lines that were appended to a file since the last poll. Every byte is read once."""

    def __init__(self, path: Path, most_bytes: int = LONGEST_LINE, overwrites: bool = False) -> None:
        self._path = path
        self.offset = 0  # bytes read so far
        self._most_bytes = most_bytes
        self._overwrites = overwrites
        self._cutter = LineCutter(most_bytes, overwrites)
        # The unfinished line as it is in the file, up to _COMPARED_BYTES.
        self._unfinished = b""

    @property
    def is_overwritten(self) -> bool:
        """Whether the unfinished line is rewritten in place, as a progress bar is."""
        return self._cutter.is_overwritten

    def skip_to_end(self) -> None:
        """Skip the whole lines that are there already: a resumed run appends to old files."""
        size, torn = _torn_end(self._path)
        # The next writer cuts half a line off: its first line begins where that began.
        self.offset = size - torn

    def poll(self) -> list[str]:
        return [line.decode(errors="replace") for line, _ in self.poll_bytes()]

    def poll_bytes(self, most_bytes: int | None = None) -> list[tuple[bytes, int]]:
        """Return whole lines, each with the offset in the file where the next one begins.

        With `most_bytes`, stop after about that many: a reader of a long file can do other work in between.
        """
        lines = []
        stop_at = None if most_bytes is None else self.offset + most_bytes
        for block in self._unread():
            end = self.offset - self._cutter.pending_bytes
            self.offset += len(block)
            for line, length in self._cutter.feed(block):
                end += length
                lines.append((line, end))
            if self._cutter.pending_bytes <= _COMPARED_BYTES:
                self._unfinished = (self._unfinished + block).rpartition(b"\n")[2]
            if stop_at is not None and self.offset >= stop_at:
                break
        return lines

    @property
    def unfinished_bytes(self) -> int:
        """The length of the line that has no newline yet."""
        return self._cutter.pending_bytes

    def unfinished_line(self) -> str:
        """Return the text after the last newline. Call `poll` first: whole lines are not in it."""
        return self._cutter.rest().decode(errors="replace")

    def _unread(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                self._forget_cut_line(file)
                file.seek(self.offset)
                while block := file.read(_BLOCK_BYTES):
                    yield block
        except (FileNotFoundError, NotADirectoryError):
            return

    def _forget_cut_line(self, file: IO[bytes]) -> None:
        """Go back to the start of an unfinished line that the file's next writer has cut off."""
        pending = self._cutter.pending_bytes
        if not 0 < pending <= _COMPARED_BYTES:
            return
        file.seek(self.offset - pending)
        if file.read(pending) != self._unfinished:
            self.offset -= pending
            self._cutter = LineCutter(self._most_bytes, self._overwrites)
            self._unfinished = b""


class EventTail:
    """Reads the events that were appended to a file since the last poll."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path, LONGEST_EVENT)
        self._schema = schema_of(path)
        self.unreadable = 0  # lines so far that were not an event

    def skip_to_end(self) -> None:
        self._lines.skip_to_end()

    @property
    def offset(self) -> int:
        """Bytes of the file that have been read."""
        return self._lines.offset

    @property
    def has_unfinished_line(self) -> bool:
        return self._lines.unfinished_bytes > 0

    def poll(self, most_bytes: int | None = None) -> list[Event]:
        events = []
        for line, _ in self._lines.poll_bytes(most_bytes):
            if (event := parse_event(line, self._schema)) is not None:
                events.append(event)
            elif line:
                self.unreadable += 1
        return events

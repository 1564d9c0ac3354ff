"""The files of a run that a node sends to the launcher while they grow: what it sends, and what is accepted of it.

They come in pieces: by SSH as a line of JSON and its bytes, from a machine that joined as a message with base64.
Nothing outside the run folder is sent, and a piece is written where it belongs in the launcher's run folder and nowhere
else.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal.cluster.node import Note
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, check_name, check_rank, is_plain_name, list_below, open_below

# The most bytes of a piece of a file, and of the line that announces it.
PIECE_BYTES = 1 << 20
LINE_BYTES = 1 << 20
# The most bytes of a journal, log, event file or ledger, and of a file of a checkpoint.
_MOST_TEXT_BYTES = 1 << 30
_MOST_CHECKPOINT_BYTES = 1 << 40
_MOST_OFFSET = 1 << 62
# A plain file name: neither `..` nor hidden, and not too long for any disk.
_FILE = r"\w[\w.-]{0,99}"
# Errors of opening a link, a folder or a named pipe where a file is expected.
_NOT_A_FILE = (None, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
# After this many different refusals of one machine, further ones are not reported.
_MOST_NOTES = 8
_POLL_S = 0.1


# Sending


def send_while(is_alive: Callable[[], bool], files: FileSender) -> None:
    """Send files while the agent runs, and once more afterwards: it writes its last lines just before its end."""
    while True:
        was_alive = is_alive()
        files.send_new()
        if not was_alive:
            return
        time.sleep(_POLL_S)


class FileSender:
    """Sends what a node writes: its journal and agent log, the logs of its processes and the events of its `ranks`, to
    which the caller may add later. `keeps`: also the ledger. `put` gets a file's name, an offset and bytes.

    Nothing outside the run folder is ever sent: no symbolic link in it is followed.
    """

    def __init__(
        self,
        run: RunFolder,
        node: str,
        ranks: Collection[int],
        have: Mapping[str, int],
        keeps: bool,
        put: Callable[[str, int, bytes], None],
    ) -> None:
        self._run = run
        self._put = put
        self._ranks = ranks
        self._sent = dict(have)  # bytes of each file that were sent
        self._logs = self._name(run.logs(node))
        # Neither its orders, which hold the run's token, nor its votes, which no other node needs.
        self._always = [self._name(run.journal(node)), self._name(run.agent_log(node)), self._name(run.samples(node))]
        if keeps:
            self._always.append(run.commits.name)
        self._checkpoint: list[str] = []

    def reset(self) -> dict[str, int]:
        """Begin a launch and return the first byte that is sent of each file. What the launcher has and this folder has
        not was sent from another folder."""
        sizes: dict[str, int] = {}
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    sizes[name] = os.fstat(file.fileno()).st_size
        self._sent = {name: min(self._sent.get(name, 0), size) for name, size in sizes.items()}
        return dict(self._sent)

    def add_newest_checkpoint(self) -> None:
        """Send also the newest checkpoint, its manifest last, as it was written: it marks a complete copy."""
        if newest := max(self._run.checkpoints.glob("step-????????"), default=None):
            folder = self._name(newest)
            inside = sorted(list_below(self._run.path, folder), key=lambda name: name == "manifest.json")
            self._checkpoint = [f"{folder}/{name}" for name in inside]

    def send_new(self) -> None:
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    self._send(name, file)

    def _send(self, name: str, file: IO[bytes]) -> None:
        # Only what is there now: a rank that prints faster than the link carries must not starve the other files.
        left = os.fstat(file.fileno()).st_size - file.seek(self._sent.get(name, 0))
        while left > 0 and (piece := _whole_lines(name, file.read(min(left, PIECE_BYTES)))):
            self._put(name, self._sent.get(name, 0), piece)
            self._sent[name] = self._sent.get(name, 0) + len(piece)
            file.seek(self._sent[name])
            left -= len(piece)

    def _names(self) -> list[str]:
        logs = [f"{self._logs}/{name}" for name in list_below(self._run.path, self._logs) if is_plain_name(name)]
        events = [self._name(self._run.events(rank)) for rank in sorted(self._ranks)]
        profiles = [self._name(self._run.profile(rank)) for rank in sorted(self._ranks)]
        return [*self._always, *events, *profiles, *logs, *self._checkpoint]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes] | None]:
        """Open a file; None for one that is missing or no regular file, such as a link."""
        try:
            file = os.fdopen(open_below(self._run.path, name, os.O_RDONLY), "rb")
        except OSError:
            yield None
            return
        with file:
            yield file


def _whole_lines(name: str, piece: bytes) -> bytes:
    """Leave out half a line of a record file: a killed rank leaves one, which the next writer of the file removes."""
    if not name.endswith(".jsonl") or (len(piece) == PIECE_BYTES and b"\n" not in piece):
        return piece
    return piece[: piece.rfind(b"\n") + 1]


# The form of a piece


@dataclass(frozen=True)
class FileHeader:
    """A line of a messenger: the end of its output, the offsets at which files begin, or the header of a piece."""

    end: bool = False
    begins: Mapping[str, int] | None = None  # by file: the first byte that is sent
    path: str = ""
    offset: int = 0
    size: int = 0


def parse_header(line: bytes, sender: str) -> FileHeader:
    """Parse a line of a messenger. Raise `ControlError` for any other line."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _malformed(sender, "a line that is not a JSON object")
    if document.get("end") is True:
        return FileHeader(end=True)
    if "begins" in document:
        return FileHeader(begins=_check_sizes(document["begins"], sender))
    path, offset, size = (document.get(name) for name in ("path", "offset", "size"))
    return FileHeader(
        path=_check_path(path, sender),
        offset=_check_count(offset, sender),
        size=_check_count(size, sender, PIECE_BYTES),
    )


def piece_message(name: str, offset: int, piece: bytes) -> dict[str, Any]:
    """Return the message for a piece over the channel of a machine that joins, in either direction."""
    return {"type": "piece", "path": name, "offset": offset, "data": base64.b64encode(piece).decode()}


def read_piece(message: Mapping[str, Any], sender: str) -> tuple[str, int, bytes]:
    """Return path, offset and bytes of such a message."""
    path, offset = _check_path(message.get("path"), sender), _check_count(message.get("offset"), sender)
    data = message.get("data")
    with contextlib.suppress(ValueError):
        if isinstance(data, str):
            return path, offset, base64.b64decode(data, validate=True)
    raise _malformed(sender, f"a piece of {_shorten(path)} that is not base64")


def _check_sizes(table: object, sender: str) -> dict[str, int]:
    if not isinstance(table, dict) or len(table) > 10_000:
        raise _malformed(sender, "no table of files")
    return {_check_path(name, sender): _check_count(size, sender) for name, size in table.items()}


def _check_path(value: object, sender: str) -> str:
    if not isinstance(value, str) or len(value) > 300:
        raise _malformed(sender, f"a path that is {_shorten(value)}")
    return value


def _check_count(value: object, sender: str, most: int = _MOST_OFFSET) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _malformed(sender, f"the number {_shorten(value)} where at most {most} bytes were expected")
    return value


def _malformed(sender: str, what: str) -> ControlError:
    return ControlError(
        f"{sender} sent {what}",
        why="its shoal is another, or its messenger was tampered with",
        fix="compare versions: shoal --version",
    )


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# Receiving


class FileReceiver:
    """Writes what one node sends into this machine's run folder: its agent's journal and log, the events and logs
    of its own `ranks`, and with `keeps` also the ledger and a checkpoint.

    A file from an earlier launch continues at its end here, at whichever byte the other machine begins (`start`).
    """

    def __init__(self, run: Path, sender: str, ranks: Collection[int], keeps: bool = False) -> None:
        self._run = run
        self._sender = sender
        name = re.escape(check_name(sender))
        numbers = "|".join(str(check_rank(rank)) for rank in ranks) or r"(?!)"
        process = rf"(?:rank-(?:{numbers})|torchrun|spawn|join)"
        texts = "|".join(
            (
                rf"agents/{name}\.(?:jsonl|log)",
                rf"samples/{name}\.jsonl",
                rf"(?:events/rank-(?:{numbers})\.jsonl|profiles/rank-(?:{numbers})\.json)",
                rf"logs/{name}/{process}\.(?:log|times)",
            )
        )
        self._texts = re.compile(texts + (r"|commits\.jsonl" if keeps else ""), re.ASCII)
        self._checkpoints = re.compile(rf"checkpoints/step-\d{{8}}/{_FILE}" if keeps else r"(?!)", re.ASCII)
        self._shift: dict[str, int] = {}  # by file: the offset here minus the sender's

    def received(self) -> dict[str, int]:
        """Return how many bytes of each file are here, counted as the sender counts."""
        return {name: size - self._shift.get(name, 0) for name, size in self._sizes().items()}

    def start(self, begins: Mapping[str, int]) -> None:
        """Begin a launch: `begins` is the first byte that is sent of each file, 0 where it has none."""
        sizes = self._sizes()
        if wrong := [name for name in sizes if not 0 <= begins.get(name, 0) <= sizes[name]]:
            raise _malformed(self._sender, f"byte {begins[wrong[0]]} of {wrong[0]} as the next one")
        self._shift = {name: size - begins.get(name, 0) for name, size in sizes.items()}

    def write(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece. Raise `ControlError` and write nothing for a file that is not the sender's, a piece that
        leaves a gap, or one that makes the file too long."""
        limit = self._limit(name)
        if limit is None:
            raise ControlError(
                f"{self._sender} wanted to write {_shorten(name)} into the run folder",
                why="a machine sends what its own agent and its own ranks wrote, and nothing else",
            )
        begin = offset + self._shift.get(name, 0)
        if offset < 0 or begin + len(piece) > limit or len(piece) > PIECE_BYTES:
            raise ControlError(
                f"{self._sender} sent {len(piece)} bytes of {name} for byte {begin}",
                why=f"a piece has at most {PIECE_BYTES} bytes, and this file at most {limit}",
            )
        try:
            file = os.fdopen(open_below(self._run, name, os.O_RDWR | os.O_CREAT, make_folders=True), "r+b")
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            raise ControlError(
                f"{name} of {self._sender} is not written: {error.strerror or 'it is no regular file'}",
                why="something else lies at its place in the run folder",
            ) from None
        with file:
            if begin > os.fstat(file.fileno()).st_size:
                raise ControlError(
                    f"{self._sender} sent byte {begin} of {name}, which has fewer here",
                    why="files come from their beginning, without gaps",
                )
            file.seek(begin)
            file.write(piece)

    def _limit(self, name: str) -> int | None:
        """Return the most bytes that the file may have; None for one that the sender may not write."""
        if self._texts.fullmatch(name):
            return _MOST_TEXT_BYTES
        return _MOST_CHECKPOINT_BYTES if self._checkpoints.fullmatch(name) else None

    def _sizes(self) -> dict[str, int]:
        files = (path for path in self._run.rglob("*") if path.is_file() and not path.is_symlink())
        names = {str(path.relative_to(self._run)): path.stat().st_size for path in files}
        return {name: size for name, size in names.items() if self._limit(name) is not None}


class RefusedFiles:
    """Reports each kind of refused piece of a sender once. Refused pieces are left out, and the run continues."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._noted: set[str] = set()

    def add(self, about: str, error: ControlError) -> None:
        if about not in self._noted and len(self._noted) < _MOST_NOTES:
            self._noted.add(about)
            more = " (no more of these are named)" if len(self._noted) == _MOST_NOTES else ""
            self._note(f"refused: {error.seen}{': ' + error.why if error.why else ''}{more}")

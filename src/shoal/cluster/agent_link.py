"""A launcher's connection to the agent it started on a node, and the files that the node sends back over it.

Pieces of files from another machine are written where they belong in our run folder and nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.cluster.node import Note
from shoal.control.fork_request import TEMPLATE_FD
from shoal.control.processes import make_marks
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, check_name, check_rank, open_below

STDIN_FD = "SHOAL_STDIN_FD"
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
# After so many different refusals of one machine, further ones are not reported.
_MOST_NOTES = 8


def agent_command(run: Path | str, node: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command of an agent. `env` sets its marks: on an emulated node the process that we start is only a
    helper, and must not have them."""
    variables = {**make_marks(run, "agent"), "SHOAL_NODE": check_name(node)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("env", *words, python, "-P", "-m", "shoal.agent.agent")


class AgentLink(Protocol):
    """`send` carries orders to the agent; its answers are in its journal in the run folder."""

    def send(self, line: bytes) -> None:
        """Send an order; do nothing when the agent has ended, which its journal shows."""
        ...

    def ended(self) -> str | None:
        """Describe how the agent ended; None while it runs."""
        ...

    def is_reachable(self) -> bool:
        """Tell whether an order would arrive now."""
        ...

    def kill(self) -> None: ...
    def close(self) -> None: ...


class PipeLink:
    """A link to an agent on this machine or on an emulated node, which share our run folder."""

    def __init__(
        self, argv: Sequence[str], run: Path, node: str, stdin: int | None = None, template: int | None = None
    ) -> None:
        """Start the agent in a session of its own and not tied to this process, which it outlives.

        Its standard input carries its orders; the descriptor `stdin` is passed to it for rank 0 of a script, and
        `template` is its socket to a process from which it has ranks forked.
        """
        self._log = RunFolder(run).agent_log(node)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack, self._log.open("ab") as output:
            env, fds = dict(os.environ), []
            for name, fd in ((STDIN_FD, stdin), (TEMPLATE_FD, template)):
                if fd is not None:
                    # With another number: the agent's standard input is its own.
                    fds.append(os.dup(fd))
                    stack.callback(os.close, fds[-1])
                    env[name] = str(fds[-1])
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=fds,
                env=env,
            )

    def send(self, line: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(line)
                stdin.flush()

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        names = {int(number): number.name for number in signal.Signals}
        how = f"was killed ({names.get(-code, f'signal {-code}')})" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how += f": {lines[-1]}" if lines else ""
        return f"its agent {how}"

    def is_reachable(self) -> bool:
        return self._process.poll() is None

    def ask_to_leave(self) -> None:
        """Ask the agent to leave the run, as a machine does that is shut down."""
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Close the link. An agent that still runs continues."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            # Without this the interpreter warns about a running child when it deletes the object.
            self._process.returncode = 0


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
        raise _malformed(sender, "a line that is no JSON object")
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


def read_piece(message: Mapping[str, Any], sender: str) -> tuple[str, int, bytes]:
    """Return path, offset and bytes of a piece that a joined machine sent over its channel."""
    path, offset = _check_path(message.get("path"), sender), _check_count(message.get("offset"), sender)
    data = message.get("data")
    with contextlib.suppress(ValueError):
        if isinstance(data, str):
            return path, offset, base64.b64decode(data, validate=True)
    raise _malformed(sender, f"a piece of {_shorten(path)} that is no base64")


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


class FileReceiver:
    """Writes what one node sends into our run folder: its agent's journal and log, the events and logs of its own
    `ranks`, and with `keeps` also the ledger and a checkpoint.

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
        self._shift: dict[str, int] = {}  # by file: our offset minus the sender's

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

"""A launcher's connection to the agent it started on a node."""

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.control.processes import marks
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, check_name, check_rank, open_below

STDIN_FD = "SHOAL_STDIN_FD"


def agent_command(run: Path | str, node: str, python: str = sys.executable) -> tuple[str, ...]:
    """Marked by `env`, not by whoever starts it: on an emulated node a helper stands in between, which is no agent."""
    variables = {**marks(run, "agent"), "SHOAL_NODE": check_name(node)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("env", *words, python, "-P", "-m", "shoal.agent.agent")


class AgentLink(Protocol):
    """Orders go in by `send`; answers come by the agent's journal in the run folder."""

    def send(self, line: bytes) -> None:
        """Does nothing when the agent is gone: its journal, or the lack of it, says so."""
        ...

    def ended(self) -> str | None:
        """How the agent ended, in words; None while it lives."""
        ...

    def is_reachable(self) -> bool:
        """Whether orders would arrive now."""
        ...

    def kill(self) -> None: ...
    def close(self) -> None: ...


class PipeLink:
    """To an agent on this machine or on an emulated node of it, which share our run folder."""

    def __init__(self, argv: Sequence[str], run: Path, node: str, stdin: int | None = None) -> None:
        """In a session of its own and not tied to us: it outlives whoever started it.

        Its own standard input has its orders; `stdin` is handed to it for rank 0 of a script."""
        self._log = RunFolder(run).agent_log(node)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as handed, self._log.open("ab") as output:
            env, fds = dict(os.environ), []
            if stdin is not None:
                # Under another number: the agent's standard input is its own.
                fds.append(os.dup(stdin))
                handed.callback(os.close, fds[0])
                env[STDIN_FD] = str(fds[0])
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
        known = {int(each): each.name for each in signal.Signals}
        how = f"was killed ({known.get(-code, f'signal {-code}')})" if code < 0 else f"ended with exit code {code}"
        return f"its agent {how}" + _last_words(self._log)

    def is_reachable(self) -> bool:
        return self._process.poll() is None

    def ask_to_leave(self) -> None:
        """As the machine itself does before it is switched off."""
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Lets go of it; one that still runs goes on by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            # Not ours to wait for any longer; without this the interpreter warns when it forgets the object.
            self._process.returncode = 0


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""


# SECTION cluster/keeping
# Pieces of files that come from another machine, put where they belong in our run folder and nowhere else.


# What travels at once, and how long a line about it can be.
PIECE_BYTES = 1 << 20
LINE_BYTES = 1 << 20
# A journal, log, event file or ledger has this much at most, a file of a checkpoint more.
_MOST_TEXT_BYTES = 1 << 30
_MOST_CHECKPOINT_BYTES = 1 << 40
_MOST_OFFSET = 1 << 62
# A file's own name: neither `..` nor hidden nor longer than any disk takes.
_FILE = r"\w[\w.-]{0,99}"
# What the kernel says of a link, a folder or a named pipe where a file was due.
_NO_FILE = (None, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
# After so many different refusals of one machine, further ones are not named any more.
_MOST_NOTES = 8


@dataclass(frozen=True)
class FileHeader:
    """What a messenger announces: the end, the sizes from which it sends, or a piece of a file."""

    end: bool = False
    begins: Mapping[str, int] | None = None
    path: str = ""
    offset: int = 0
    size: int = 0


def read_head(line: bytes, sender: str) -> FileHeader:
    """Raises `ControlError` for a line that no messenger writes."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _malformed(sender, "a line that is no JSON object")
    if document.get("end") is True:
        return FileHeader(end=True)
    if "begins" in document:
        return FileHeader(begins=check_sizes(document["begins"], sender))
    path, offset, size = (document.get(name) for name in ("path", "offset", "size"))
    return FileHeader(path=_text(path, sender), offset=_count(offset, sender), size=_count(size, sender, PIECE_BYTES))


def check_sizes(table: object, sender: str) -> dict[str, int]:
    """A table of file names and sizes in bytes, as both sides send it."""
    if not isinstance(table, dict) or len(table) > 10_000:
        raise _malformed(sender, "no table of files")
    return {_text(name, sender): _count(size, sender) for name, size in table.items()}


def _text(value: object, sender: str) -> str:
    if not isinstance(value, str) or len(value) > 300:
        raise _malformed(sender, f"a path that is {_cut(value)}")
    return value


def _count(value: object, sender: str, most: int = _MOST_OFFSET) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _malformed(sender, f"the number {_cut(value)} where at most {most} bytes were due")
    return value


def _malformed(sender: str, what: str) -> ControlError:
    return ControlError(
        f"{sender} sent {what}",
        why="its shoal is another, or its messenger was tampered with",
        fix="compare versions: shoal --version",
    )


def _cut(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_piece(message: Mapping[str, Any], sender: str) -> tuple[str, int, bytes]:
    """Path, offset and bytes of a piece, as a machine that joined sends it over its channel."""
    path, offset = _text(message.get("path"), sender), _count(message.get("offset"), sender)
    try:
        return path, offset, base64.b64decode(_encoded(message.get("data")), validate=True)
    except ValueError:
        raise _malformed(sender, f"a piece of {_cut(path)} that is no base64") from None


def _encoded(data: object) -> str:
    if not isinstance(data, str):
        raise ValueError
    return data


class FileReceiver:
    """Writes what one node sends: its agent's journal and log, and the events and logs of its own `ranks`. With `keeps`
    also the ledger and a checkpoint.

    A file that is here from an earlier launch goes on where it ends, wherever the other machine begins: `start` says.
    """

    def __init__(self, run: Path, sender: str, ranks: Collection[int], keeps: bool = False) -> None:
        self._run = run
        self._sender = sender
        name = re.escape(check_name(sender))
        own = "|".join(str(check_rank(rank)) for rank in ranks) or r"(?!)"
        process = rf"(?:rank-(?:{own})|torchrun|spawn|join)"
        texts = rf"agents/{name}\.(?:jsonl|log)|events/rank-(?:{own})\.jsonl|logs/{name}/{process}\.(?:log|times)"
        self._texts = re.compile(texts + (r"|commits\.jsonl" if keeps else ""), re.ASCII)
        self._checkpoints = re.compile(rf"checkpoints/step-\d{{8}}/{_FILE}" if keeps else r"(?!)", re.ASCII)
        self._shift: dict[str, int] = {}

    def have(self) -> dict[str, int]:
        """How much of each file is here, counted as the other machine counts."""
        return {name: size - self._shift.get(name, 0) for name, size in self._sizes().items()}

    def start(self, begins: Mapping[str, int]) -> None:
        """A new launch: from which byte on each file is sent; from the first one where nothing is said."""
        sizes = self._sizes()
        if wrong := [name for name in sizes if not 0 <= begins.get(name, 0) <= sizes[name]]:
            raise _malformed(self._sender, f"byte {begins[wrong[0]]} of {wrong[0]} as the next one")
        self._shift = {name: size - begins.get(name, 0) for name, size in sizes.items()}

    def keep(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece. Raises `ControlError` for a file that is not the sender's, a piece that leaves a gap, or one
        that makes the file too long; nothing is written then."""
        limit = self._limit(name)
        if limit is None:
            raise ControlError(
                f"{self._sender} wanted to write {_cut(name)} into the run folder",
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
            if error.errno not in _NO_FILE:
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
        """How long the file may become; None for one that the sender may not write."""
        if self._texts.fullmatch(name):
            return _MOST_TEXT_BYTES
        return _MOST_CHECKPOINT_BYTES if self._checkpoints.fullmatch(name) else None

    def _sizes(self) -> dict[str, int]:
        files = (path for path in self._run.rglob("*") if path.is_file() and not path.is_symlink())
        names = {str(path.relative_to(self._run)): path.stat().st_size for path in files}
        return {name: size for name, size in names.items() if self._limit(name) is not None}


class RefusedFiles:
    """Notes what of a sender was refused, each kind once. What was refused is left out, and the run goes on."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted: set[str] = set()

    def add(self, about: str, error: ControlError) -> None:
        if about not in self._noted and len(self._noted) < _MOST_NOTES:
            self._noted.add(about)
            more = " (no more of these are named)" if len(self._noted) == _MOST_NOTES else ""
            self._note(f"refused: {error.seen}{': ' + error.why if error.why else ''}{more}")

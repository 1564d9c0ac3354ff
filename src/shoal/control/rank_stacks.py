"""The Python stacks of a running rank, on request: also of one that is stuck in a collective, a sleep or other C code.

A rank registers a handler of `faulthandler`, which runs in C and needs neither the interpreter nor its lock. The stacks
go into a file of the run folder that is emptied before each request, so it never has more than the last answer.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import shoal
from shoal.control.processes import PART_MARK, RUN_MARK
from shoal.host.proc import catches_signal
from shoal.run_folder import RunFolder, check_name, open_below
from shoal.terminal import printable_line
from shoal.units import pluralize

# A real-time signal: SIGUSR1 and SIGUSR2 are used by Slurm, Lightning and users' own scripts. 0: there is none.
STACKS_SIGNAL = signal.SIGRTMAX - 2 if sys.platform == "linux" else 0
# faulthandler writes at most 100 threads of 100 frames; real ranks have about 5 kB.
_MOST_BYTES = 1 << 20
_MOST_SOURCE_BYTES = 4 << 20
_LONGEST_LINE = 200
_RANK = re.compile(r"rank-(\d+)")
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<")
# Frames of an import, which Python leaves out of tracebacks too.
_IMPORTING = "<frozen importlib"
_SHOAL = f"{Path(shoal.__file__).parent}{os.sep}"


def is_library(file: str) -> bool:
    """Return whether a source file belongs to Python or to an installed package, such as torch."""
    return _LIBRARY.search(file) is not None


def rank_of(part: str) -> int | None:
    """Return the number of the rank whose processes have this name; None for other parts of a run."""
    match = _RANK.fullmatch(part)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class StackFrame:
    file: str
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Whether it is the user's code: neither shoal's, nor torch's, nor Python's."""
        return not is_library(self.file) and not self.file.startswith(_SHOAL)

    @property
    def source(self) -> str:
        """The line itself, where its file can be read on this machine."""
        path = Path(self.file)
        with suppress(OSError, ValueError):
            if path.is_file() and path.stat().st_size <= _MOST_SOURCE_BYTES:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                return printable_line(lines[self.line - 1].strip(), _LONGEST_LINE) if self.line <= len(lines) else ""
        return ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}, in {self.function}"
        return f"{place}: {source}" if (source := self.source) else place


@dataclass(frozen=True)
class RankStacks:
    """The frames of all threads of a rank, the main thread first, each with the most recent call last."""

    threads: tuple[tuple[StackFrame, ...], ...]

    @property
    def place(self) -> StackFrame:
        """The innermost line of the user's code in the main thread; without any, the innermost line."""
        main = self.threads[0]
        return next((frame for frame in reversed(main) if frame.is_own), main[-1])


def parse_stacks(text: str) -> RankStacks | None:
    """Read what faulthandler wrote; None if it has no whole frame. Of two answers in one file the later one counts."""
    threads: dict[str, list[StackFrame]] = {}
    frames: list[StackFrame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = []
            # Its place in the order is that of the later answer, too.
            threads.pop(thread[1], None)
            threads[thread[1]] = frames
        elif frame := _FRAME.fullmatch(line):
            file, function = (printable_line(part, _LONGEST_LINE) for part in (frame[1], frame[3]))
            frames.append(StackFrame(file, int(frame[2]), function))
    # faulthandler begins with the newest thread, and with the most recent call.
    stacks = tuple(tuple(reversed(frames)) for frames in reversed(threads.values()) if frames)
    return RankStacks(stacks) if stacks else None


def register_stacks() -> None:
    """Have this process write its stacks whenever it is asked to, if it is a rank of a run."""
    run, part = os.environ.get(RUN_MARK, ""), os.environ.get(PART_MARK, "")
    if not STACKS_SIGNAL or not run or rank_of(part) is None or catches_signal(os.getpid(), STACKS_SIGNAL):
        return
    with suppress(OSError):
        fd = _open(RunFolder(Path(run)), part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


def ask_for_stacks(run: RunFolder, part: str, pid: int) -> bool:
    """Have a rank write its stacks; return False where it cannot: without its handler the signal would end it."""
    with suppress(OSError):
        # Also without a handler: an answer of the rank's former process must not be read.
        os.close(_open(run, part, os.O_WRONLY | os.O_TRUNC))
    if not STACKS_SIGNAL or not pid or not catches_signal(pid, STACKS_SIGNAL):
        return False
    with suppress(OSError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def read_stacks(run: RunFolder, part: str) -> RankStacks | None:
    """Return what the rank has written since it was asked; None if that is nothing yet."""
    with suppress(OSError), os.fdopen(_open(run, part, os.O_RDONLY), "rb") as file:
        return parse_stacks(file.read(_MOST_BYTES).decode(errors="replace"))
    return None


def stack_lines(stacks: RankStacks) -> Iterator[str]:
    """Yield the stacks as Python prints them, with `>` before the line of the user's code that the rank is in.

    Of the threads that run no code of the user only the main one is printed.
    """
    shown = [frames for frames in stacks.threads[1:] if any(frame.is_own for frame in frames)]
    for number, frames in enumerate((stacks.threads[0], *shown)):
        if number:
            yield "  another thread (most recent call last):"
        for frame in frames:
            if frame.file.startswith(_IMPORTING):
                continue
            mark = ">" if frame is stacks.place else " "
            yield f'{mark} File "{frame.file}", line {frame.line}, in {frame.function}'
            if source := frame.source:
                yield f"{mark}   {source}"
    if hidden := len(stacks.threads) - 1 - len(shown):
        yield f"  and {pluralize(hidden, 'more thread')} of shoal and its libraries: --json"


def _open(run: RunFolder, part: str, flags: int) -> int:
    name = f"{run.stacks.name}/{check_name(part, 'process name')}.txt"
    return open_below(run.path, name, flags, make_folders=bool(flags & os.O_CREAT))

"""The commands a lab is made of, as data: what `--dry-run` prints is what `apply` does."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PidOf:
    """The first process of a node, or of the switch: its number is known once it runs, and stands in this file."""

    file: Path


Word = str | PidOf


@dataclass(frozen=True)
class Run:
    """One command. `log` takes the output of one that stays: it must not hold our own pipes open."""

    words: tuple[Word, ...]
    log: Path | None = None


@dataclass(frozen=True)
class Write:
    path: Path
    text: str


@dataclass(frozen=True)
class Await:
    """Until the file has content; `log` says why it never got any."""

    file: Path
    log: Path


@dataclass(frozen=True)
class Kill:
    """The first process of a pid namespace; the kernel ends all the others in it, and the namespaces in them."""

    pid: PidOf


@dataclass(frozen=True)
class RemoveGroup:
    """Tried again for a while: a control group can go once the kernel has buried its last process."""

    path: Path


Step = Run | Write | Await | Kill | RemoveGroup


def render(steps: Iterable[Step]) -> str:
    """A script for `sh`."""
    return "".join(f"{render_step(step)}\n" for step in steps)


def render_step(step: Step) -> str:
    match step:
        case Run(words, log):
            return _words(words) + (f" > {_quote(log)} 2>&1 < /dev/null" if log else "")
        case Write(path, text):
            return f"{_printed(text)} > {_quote(path)}"
        case Await(file, _):
            return f"until test -s {_quote(file)}; do sleep 0.01; done"
        case Kill(pid):
            return f"kill -KILL {_word(pid)}"
        case RemoveGroup(path):
            return f"until rmdir {_quote(path)}; do sleep 0.1; done"


def _words(words: Sequence[Word]) -> str:
    return " ".join(_word(word) for word in words)


def _word(word: Word) -> str:
    return f'"$(cat {_quote(word.file)})"' if isinstance(word, PidOf) else shlex.quote(word)


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _printed(text: str) -> str:
    lines = text.splitlines()
    if len(lines) == 1:
        return f"echo {shlex.quote(lines[0])}"
    return "printf '%s\\n' " + " ".join(shlex.quote(line) for line in lines)

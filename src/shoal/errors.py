"""Every error that shoal raises on purpose.

    ShoalError                exit 3   any failure
    ├── UsageError            exit 2   the command line, the configuration or an input file is wrong
    │   ├── ConfigError                an unknown key, a value out of range, settings that contradict each other
    │   └── DataError                  a text, token file or run folder that cannot be used
    ├── LabError              exit 3   an emulated node could not be created, changed or removed
    ├── HostError             exit 3   a machine could not be reached or prepared over SSH
    ├── CheckpointError       exit 3   a checkpoint is missing or broken
    ├── RunFailed             exit 3   a rank failed, or the process group did not form
    │   ├── OutOfMemory                a rank needed more memory than its machine or GPU has
    │   ├── PeerLost                   a collective failed because another rank is gone: a consequence, not a cause
    │   ├── ForeignConnection          a process outside the run took a rank's place while a gloo group formed
    │   └── ControlError               a node cannot be reached, or cannot train with the others
    │       └── UnknownSender          the token handshake with another process failed, on either side
    └── Interrupted           exit 130 Ctrl-C or a signal ended the command; a checkpoint was saved if one was due

A message has three parts: what was seen, the cause or likely cause, and the next command. `shoal.cli.main` prints them;
a worker writes them to its log.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

# The colon before a command that ends a message: "undo it: shoal lab heal node1".
_COMMAND_AT_END = re.compile(r": (?=(?:shoal|sudo|ssh|python[\d.]*) (?:(?!: ).)+\Z)")
# A text that has no command: neither after a colon nor as a whole.
_PROSE = re.compile(r"(?!(?:shoal|sudo|ssh\S*|pip|ls|df|ulimit|iconv|DataLoader\S*|torch\.\S*|--\S*) )(?:(?!: ).)+")


class ShoalError(Exception):
    exit_code = 3
    label = "error: "  # before its first line

    def __init__(self, seen: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.why = why
        self.fix = fix

    def render(self, width: int | None = None) -> str:
        """Return the text for a user, wrapped at words if there is a width. A command to paste stays on one line."""
        why = self.why.replace("\n", "\n        ")
        if width is None:
            lines = [f"{self.label}{self.seen}", *([f"  why:  {why}"] if why else [])]
        else:
            lines = [*_wrap(self.label, self.seen, width), *(_wrap("  why:  ", self.why, width) if why else [])]
        label = "  next: "
        # Two things that can be done are two lines, so that the command in each can be pasted.
        for fix in self.fix.split("\n") if self.fix else []:
            prose, command = split_command(fix)
            can_wrap = bool(command) or _PROSE.fullmatch(fix)
            if width is None or not can_wrap or len(label) + len(fix) <= width:
                lines.append(label + fix)
            else:
                lines += [*_wrap(label, prose, width), *([f"        {command}"] if command else [])]
            label = " " * len(label)
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of a rank's `fault` event and of `--json`."""
        return {"error": type(self).__name__, "seen": self.seen, "why": self.why, "fix": self.fix}


def split_command(text: str) -> tuple[str, str]:
    """Return the text up to the command at its end, and that command; without one, the text and nothing.

    A command that a line break divides cannot be pasted, so where there is little room it gets a line of its own.
    """
    match = _COMMAND_AT_END.search(text)
    return (text[: match.start() + 1], text[match.end() :]) if match else (text, "")


def _wrap(label: str, text: str, width: int) -> list[str]:
    """Return lines under a label, indented as its first one."""
    indent, lines = " " * len(label), []
    for line in text.split("\n"):
        lines += textwrap.wrap(line, width - len(label), break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{indent if number else label}{line}" for number, line in enumerate(lines)]


class UsageError(ShoalError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(UsageError):
    pass


class LabError(ShoalError):
    pass


class HostError(ShoalError):
    pass


class CheckpointError(ShoalError):
    pass


class RunFailed(ShoalError):
    # Logs of the failed ranks, the first failure first; set only where the error itself does not name the cause.
    logs: tuple[str, ...] = ()


class OutOfMemory(RunFailed):
    pass


class PeerLost(RunFailed):
    pass


class ForeignConnection(RunFailed):
    pass


class ControlError(RunFailed):
    pass


class UnknownSender(ControlError):
    pass


class Interrupted(ShoalError):
    """The user asked for it: nothing went wrong."""

    exit_code = 130
    label = ""


def from_dict(fault: dict[str, Any]) -> ShoalError:
    """Rebuild an error that another process wrote with `as_dict`, as the same class; RunFailed if it is unknown."""
    classes: list[type[ShoalError]] = [ShoalError]
    for cls in classes:
        classes += cls.__subclasses__()
    by_name = {cls.__name__: cls for cls in classes}
    cls = by_name.get(str(fault.get("error")), RunFailed)
    return cls(str(fault.get("seen", "")), why=str(fault.get("why", "")), fix=str(fault.get("fix", "")))

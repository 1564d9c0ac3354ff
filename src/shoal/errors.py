"""Every error shoal raises on purpose.

    ShoalError              exit 3   something went wrong while working
    ├── UsageError          exit 2   the command line, the configuration or an input file is wrong
    │   ├── ConfigError              an unknown key, a value out of range, settings that contradict each other
    │   └── DataError                a text, token file or run folder that cannot be used
    ├── LabError            exit 3   an emulated node could not be made, changed or removed
    ├── HostError           exit 3   a machine could not be reached or prepared over SSH
    ├── CheckpointError     exit 3   a checkpoint is missing or broken
    ├── RunFailed           exit 3   a rank failed, or the world did not form
    │   ├── OutOfMemory              a rank asked for more memory than its machine or GPU has
    │   ├── PeerLost                 an exchange failed because another rank is gone: a consequence, not a cause
    │   ├── ForeignConnection        a process outside the run took a rank's place while a gloo group formed
    │   └── ControlError             a machine that cannot be reached, or cannot train with the others
    │       └── Stranger             it does not know the run's token, or says that we don't
    └── Interrupted         exit 130 somebody pressed Ctrl-C; what was asked to be saved is saved

A message has three parts: what was seen, why that is (or probably is), and what to type next. The command line
prints them in one place (`shoal.cli.main`), a worker in its log.
"""

from __future__ import annotations

from typing import Any


class ShoalError(Exception):
    """What was seen, the likely cause, and the next command."""

    exit_code = 3

    def __init__(self, seen: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.why = why
        self.fix = fix

    def render(self) -> str:
        lines = [f"error: {self.seen}"]
        if self.why:
            lines.append("  why:  " + self.why.replace("\n", "\n        "))
        if self.fix:
            lines.append(f"  next: {self.fix}")
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """For the `fault` event of a rank and for `--json`."""
        return {"error": type(self).__name__, "seen": self.seen, "why": self.why, "fix": self.fix}


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
    """`logs`: where the ranks that failed left their last words, the first of them first, when the error itself does
    not say what these mean."""

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
    exit_code = 130


def from_dict(fault: dict[str, Any]) -> ShoalError:
    """The error that another process wrote down with `as_dict`, as the same class again."""
    kind = _kinds(ShoalError).get(str(fault.get("error")), RunFailed)
    return kind(str(fault.get("seen", "")), why=str(fault.get("why", "")), fix=str(fault.get("fix", "")))


def _kinds(kind: type[ShoalError]) -> dict[str, type[ShoalError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found |= _kinds(child)
    return found

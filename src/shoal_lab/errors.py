"""The errors of a lab: what was seen, the cause or likely cause, and the next command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """A lab or a node of it could not be created, changed or removed."""

    def __init__(self, seen: str, *, why: str = "", fix: str = "") -> None:
        super().__init__("\n".join(filter(None, (seen, why and f"  why:  {why}", fix and f"  next: {fix}"))))
        self.seen = seen
        self.why = why
        self.fix = fix


class LabUsageError(LabError):
    """What was asked for is wrong: a name, a number, or a lab or tool that does not exist."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'node1'?`, or '' if no name is similar. Of equally similar names it is the first."""
    similarity = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in known}
    nearest = max(similarity, key=similarity.__getitem__, default=None)
    return f"did you mean {nearest!r}?" if nearest is not None and similarity[nearest] >= 0.5 else ""

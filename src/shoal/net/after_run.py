"""What a failed run says of itself at its end: the meaning of its ranks' last words, where it is known."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import RunFailed
from shoal.net.explain import Explanation, Findings, merge
from shoal.net.gather import explain_file
from shoal.net.pattern import Weight


def put_into_words(error: RunFailed) -> None:
    """Adds cause and fix to an error that only says which rank failed."""
    found = merge(explain_file(log) for log in map(Path, error.logs) if log.is_file())
    if (best := _worth_saying(found)) is not None:
        error.why = "\n".join(filter(None, (f"{best.cause} ({best.id})", error.why)))
        error.fix = "; ".join(filter(None, (best.fix, error.fix)))


def _worth_saying(found: Findings) -> Explanation | None:
    """A guess is not, where another error stands beside it that nobody knows."""
    if found.best is None or found.best.id.startswith("shoal."):
        return None
    is_guess = found.best.weight == Weight.LIKELY
    return found.best if found.is_explained and not (is_guess and found.unknown) else None

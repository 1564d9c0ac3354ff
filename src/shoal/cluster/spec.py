"""What `--on` says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import UsageError

_LOCAL = re.compile(r"local(?::(-?\d+))?")


@dataclass(frozen=True)
class LocalSpec:
    """Ranks as processes on this machine."""

    ranks: int


def parse_on(text: str) -> LocalSpec:
    match = _LOCAL.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--on {text!r} names no cluster",
            why="this version starts ranks on this machine only",
            fix="write for example: --on local:2",
        )
    ranks = int(match[1] or 1)
    if ranks < 1:
        raise UsageError(
            f"--on {text}: a world needs at least one rank", fix="write for example: --on local:2 for two ranks"
        )
    return LocalSpec(ranks)

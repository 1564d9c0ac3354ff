"""`--on join:3`: this machine, and two that will come by themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import UsageError

_JOIN = re.compile(r"join:(?P<machines>\d{1,9})(?:,address=(?P<address>[^,]+))?(?:,port=(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class JoinSpec:
    """One rank a machine. `address` is ours, by which the others reach us; left out, it is found."""

    machines: int
    address: str | None = None
    port: int = 0


def parse_join(text: str) -> JoinSpec:
    match = _JOIN.fullmatch(text)
    if match is None or int(match["machines"]) < 2:
        raise UsageError(
            f"--on {text!r} names no cluster",
            why="join:N is this machine and N - 1 others that join it, so N is at least 2",
            fix="write for example: --on join:2, or --on join:2,address=192.168.1.5",
        )
    return JoinSpec(int(match["machines"]), match["address"], int(match["port"] or 0))

"""The names of generations and lineages, as ranks, agents and ledgers write them: 7-2."""

from __future__ import annotations

import re
from typing import Any

from shoal.control.membership.generation import NEVER, Ballot

_NAME = re.compile(r"(\d{1,15})-(\d{1,9})", re.ASCII)


def read_ballot(value: Any) -> Ballot | None:
    """None for what is no name. A run in which nobody comes or goes writes 0-0, a plain 0, or nothing at all."""
    if value is None or value == 0:
        return NEVER
    match = _NAME.fullmatch(value) if isinstance(value, str) else None
    return Ballot(int(match[1]), int(match[2])) if match else None

"""What a rank says when it enters a generation: its `membership` event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.control.membership.generation import Ballot
from shoal.events import Event
from shoal.report.ballots import read_ballot


@dataclass(frozen=True)
class Entered:
    """`ids` are the ranks' own numbers, `step` the last one that the generation's state has behind it. `lost_s` is how
    long this rank did not train for it: until it had stopped, was told, had its group and had the state."""

    rank: int
    time: float
    generation: Ballot
    lineage: Ballot
    ids: tuple[int, ...]
    step: int
    how: str
    lost_s: float

    @property
    def is_first(self) -> bool:
        """The generation is the one that a launch began with."""
        return self.how == "first"


def read_entered(event: Event) -> Entered | None:
    """None for an event that lacks what nothing can be said without."""
    generation, lineage, ids = read_ballot(event.get("generation")), read_ballot(event.get("lineage")), event.get("ids")
    if generation is None or lineage is None or not isinstance(ids, list) or not all(map(_is_id, ids)) or not ids:
        return None
    return Entered(
        rank=event["rank"],
        time=_seconds(event.get("time")),
        generation=generation,
        lineage=lineage,
        ids=tuple(ids),
        step=event["step"] if _is_id(event.get("step")) else 0,
        how=str(event.get("how")),
        lost_s=sum(_seconds(event.get(name)) for name in ("halted_s", "waited_s", "formed_s", "copied_s")),
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0

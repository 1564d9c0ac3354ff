"""Who was in the world, and were replicas equal, by what their ranks said? Pure."""

from __future__ import annotations

from shoal.events import Event
from shoal.trials.chaos.record import Record

Ballot = tuple[int, int]


def ballot(text: str) -> Ballot:
    number, _, member = text.partition("-")
    return int(number), int(member or 0)


def ranks_that_ended(record: Record) -> list[Event]:
    """The last event of each rank that has one to end with."""
    last = {event.get("rank"): event for event in record.ranks}
    return [event for event in last.values() if event.get("event") == "end"]


def compare_told(record: Record, every: int) -> tuple[bool | None, int]:
    """Ranks compare themselves after each `every` steps and tell of a difference. None where the newest generation has
    not come to that yet: then nobody knows."""
    if record.ranks_said("divergence"):
        return False, 0
    newest = newest_generation(record)
    if newest is None:
        return None, 0
    size, began = int(newest["size"]), int(newest["step"])
    if size > 1 and record.furthest_step // every <= began // every:
        return None, 0
    return True, size


def newest_generation(record: Record) -> Event | None:
    """Of all that ranks have entered."""
    return max(record.ranks_said("membership"), key=lambda event: ballot(str(event["generation"])), default=None)


def came_back(record: Record, after: float) -> float | None:
    """When a rank that had no part in the training any more had one again: among ranks that trained, or after all
    went back to a checkpoint."""
    joined = (event for event in record.ranks_said("membership") if event.get("how") in ("joined", "recovered"))
    return min((float(event["time"]) for event in joined if event["time"] > after), default=None)

"""Were replicas equal, by what their ranks said? Pure."""

from __future__ import annotations

from shoal.events import Event
from shoal.trials.chaos.record import Record


def ranks_that_ended(record: Record) -> list[Event]:
    """The last event of each rank that has one to end with."""
    last = {event.get("rank"): event for event in record.ranks}
    return [event for event in last.values() if event.get("event") == "end"]


def compare_told(record: Record) -> tuple[bool | None, int]:
    """Digests of the same step, over all steps that more than one rank told of; None where there is no such step."""
    by_step: dict[int, dict[int, str]] = {}
    for event in record.ranks_said("digest"):
        # A rank that did the step again has the later word: the earlier state was thrown away.
        by_step.setdefault(int(event["step"]), {})[int(event["rank"])] = str(event["sha256"])
    compared = [told for told in by_step.values() if len(told) > 1]
    if not compared:
        return None, 0
    return all(len(set(told.values())) == 1 for told in compared), max(map(len, compared))

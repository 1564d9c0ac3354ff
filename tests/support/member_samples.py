"""Hand-written events of runs with changing membership, for the tests of the readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.events import Event
from tests.support.run_samples import end, start, step

BEGAN = 1_790_000_000.0


def entered(
    rank: int,
    generation: str,
    ids: Sequence[int],
    after: int,
    lineage: str = "1-0",
    how: str = "regrouped",
    **more: Any,
) -> Event:
    """Return a membership event: 0.5 s to stop and agree, 0.25 s to form the group, 0.25 s more for a copy."""
    copied = how == "joined"
    facts = {
        "generation": generation, "lineage": lineage, "ids": list(ids), "size": len(ids), "step": after, "how": how,
        "world_rank": list(ids).index(rank), "halted_s": 0.1, "waited_s": 0.4, "formed_s": 0.25,
        "copied_s": 0.25 if copied else 0.0, "copied": copied,
    }  # fmt: skip
    if how == "first":
        facts |= {"halted_s": 0.0, "waited_s": 0.0, "formed_s": 0.0}
    return {"event": "membership", "rank": rank, "time": time_of(after) + 0.75, **facts, **more}


def time_of(number: int) -> float:
    """Return the time at which a step of `run_samples.step` was recorded."""
    return BEGAN + 1.0 + number


def steps(rank: int, first: int, last: int, **more: Any) -> list[Event]:
    return [step(number, rank, **more) for number in range(first, last + 1)]


def killed_and_rejoined() -> list[Event]:
    """Three ranks to step 100; rank 2 is killed after step 40, and its restarted process joins after step 50."""
    events: list[Event] = []
    for rank in (0, 1, 2):
        events += [start(rank, 3), entered(rank, "1-0", (0, 1, 2), 0, how="first"), *steps(rank, 1, 40, step_s=0.3)]
    for rank in (0, 1):
        events += [entered(rank, "2-0", (0, 1), 39), *steps(rank, 40, 50, step_s=0.2)]
        events += [entered(rank, "4-0", (0, 1, 2), 50), *steps(rank, 51, 100, step_s=0.3), end(rank)]
    again = {"time": time_of(50), "resumed_from": 0}
    events += [start(2, 3, **again), entered(2, "4-0", (0, 1, 2), 50, how="joined"), *steps(2, 51, 100, step_s=0.3)]
    return [*events, end(2)]


def parted() -> list[Event]:
    """Two ranks are partitioned after step 20 and both continue; rank 1 stops at step 26 and rejoins after 40."""
    events: list[Event] = []
    for rank in (0, 1):
        events += [start(rank, 2), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 20, loss=3.0)]
    events += [entered(0, "3-0", (0,), 20, "3-0"), *steps(0, 21, 40, loss=2.0)]
    events += [entered(1, "3-1", (1,), 20, "3-1"), *steps(1, 21, 26, loss=9.0)]
    events.append({"event": "eval", "rank": 1, "step": 25, "val_loss": 9.0})
    for rank, how in ((0, "regrouped"), (1, "joined")):
        events += [entered(rank, "5-0", (0, 1), 40, "3-0", how), *steps(rank, 41, 60, loss=1.0), end(rank, 60)]
    return events


def commit_records(
    first: int, last: int, generation: str, lineage: str = "1-0", members: Sequence[int] = (0, 1)
) -> list[Event]:
    return [
        {
            "step": number, "samples": [24 * (number - 1), 24 * number], "members": list(members),
            "generation": generation, "lineage": lineage, "loss": 1.0, "time": time_of(number),
        }
        for number in range(first, last + 1)
    ]  # fmt: skip

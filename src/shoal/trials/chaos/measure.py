"""From the events of a run to figures: how long until what, and what was lost. Pure.

All times are of one machine's clock: an emulated node has no other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from shoal.events import Event
from shoal.report.ledger import check_ledger
from shoal.trials.chaos.record import Record
from shoal.trials.chaos.replicas import Ballot, ballot, came_back, newest_generation


class Measured(BaseModel):
    """Seconds since the first injection, None for what never happened. `next_step_s` of a run that did not regroup is
    its longest time without a step. `slower` compares the median step after the last injection with that before the
    first. `resumed_behind`: how many committed steps were done again after the last resume. `warned`: what ranks said
    of a slow training, and how many steps after the first injection."""

    model_config = ConfigDict(frozen=True)

    detect_s: float | None = None
    regroup_s: float | None = None
    next_step_s: float | None = None
    next_commit_s: float | None = None
    rejoin_s: float | None = None
    pause_s: float | None = None
    longest_pause_s: float | None = None
    return_pause_s: float | None = None
    reconfigurations: int = 0
    members: int | None = None
    steps: int = 0
    committed: int = 0
    lost_steps: int = 0
    lost_samples: int = 0
    redone_steps: int = 0
    stale_commits: int = 0
    abandoned: int = 0
    slower: float | None = None
    resumed_behind: int | None = None
    ledger_ok: bool = True
    sentences: tuple[str, ...] = ()
    warned: tuple[tuple[str, int], ...] = ()


def measure(record: Record) -> Measured:
    if not record.injected:
        return Measured()
    first, last = (float(record.injected[i]["time"]) for i in (0, -1))
    regrouped = _regrouped(record, first)
    ledger = check_ledger(record.commits)
    lost_samples = sum(end - begin for begin, end in ledger.gaps)
    steps = sorted(float(event["time"]) for event in record.ranks_said("step"))
    pause = longest_pause(steps, first, record.asked_at)
    regroup, newest = _formed(regrouped), newest_generation(record)
    return Measured(
        detect_s=_since(first, _first_after(first, _signs_of_loss(record))),
        regroup_s=_since(first, regroup),
        next_step_s=pause if regroup is None else _since(first, _first_after(regroup, steps)),
        next_commit_s=_since(first, _first_after(regroup or first, _times(record.commits))),
        rejoin_s=_since(last, came_back(record, last)),
        pause_s=_since(first, _first_after(first, _times(record.agents_said("pause")))),
        longest_pause_s=pause,
        return_pause_s=longest_pause(steps, last, record.asked_at),
        reconfigurations=len({event["generation"] for event in regrouped}),
        members=None if newest is None else int(newest["size"]),
        steps=record.furthest_step,
        committed=ledger.steps,
        lost_steps=_lost_steps(record, lost_samples),
        lost_samples=lost_samples,
        redone_steps=_redone(record),
        stale_commits=count_stale(record.commits),
        abandoned=sum("abandoned" in commit for commit in record.commits),
        slower=_slower(record, first, last),
        resumed_behind=_resumed_behind(record, first),
        ledger_ok=ledger.ok,
        sentences=sentences(record, first),
        warned=warned(record, first),
    )


def count_stale(commits: Sequence[Event]) -> int:
    """Commits of a generation that an earlier line of the ledger had left behind, in its own lineage: two lineages may
    both go on, and each counts its generations for itself."""
    newest: dict[str, Ballot] = {}
    stale = 0
    for commit in (each for each in commits if "generation" in each):
        lineage, generation = str(commit.get("lineage")), ballot(str(commit["generation"]))
        stale += generation < newest.get(lineage, (0, 0))
        newest[lineage] = max(generation, newest.get(lineage, (0, 0)))
    return stale


def longest_pause(steps: Sequence[float], after: float, until: float | None = None) -> float | None:
    """Between two steps of anybody, and from the last one to the moment `until` which it should have trained; the one
    that the injection fell into counts from its beginning."""
    moments = [*(step for step in steps if until is None or step < until), *([until] if until is not None else [])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments) if later > after]
    return max(gaps, default=None)


def sentences(record: Record, after: float) -> tuple[str, ...]:
    """What the user was told: the keeper's notes and its last words, the ranks' warnings, and where they went on."""
    keeper = [event for event in record.keeper if event["time"] > after]
    notes = [str(event["text"]) for event in keeper if event.get("event") == "note"]
    warnings = [str(event["seen"]) for event in record.ranks_said("warning") if event["time"] > after]
    starts = [event for event in record.ranks_said("start") if event["time"] > after and event.get("resumed_from")]
    resumed = [f"going on after step {event['resumed_from']}" for event in starts]
    ends = [str(event["seen"]) for event in keeper if event.get("event") == "ended" and event.get("seen")]
    return tuple(dict.fromkeys([*notes, *warnings, *resumed, *ends]))


def warned(record: Record, after: float) -> tuple[tuple[str, int], ...]:
    done = max((int(event["step"]) for event in record.ranks_said("step") if event["time"] <= after), default=0)
    said = [event for event in record.ranks_said("warning") if event["time"] > after and "step" in event]
    return tuple((str(event["seen"]), int(event["step"]) - done) for event in said)


def _regrouped(record: Record, after: float) -> list[Event]:
    """Memberships since the injection; that of a launch is nobody's loss."""
    said = record.ranks_said("membership")
    return [event for event in said if event["time"] > after and event.get("how") != "first"]


def _formed(regrouped: Sequence[Event]) -> float | None:
    """When the last rank of the first new generation was in it."""
    if not regrouped:
        return None
    first = min(regrouped, key=lambda event: float(event["time"]))["generation"]
    return max(float(event["time"]) for event in regrouped if event["generation"] == first)


def _signs_of_loss(record: Record) -> list[float]:
    ended_badly = [event for event in record.agents_said("ended") if event.get("code")]
    return _times(
        [
            *record.ranks_said("lost", "fault"),
            *record.agents_said("lost", "closed", "broken", "pause", "tell"),
            *ended_badly,
        ]
    )


def _lost_steps(record: Record, lost_samples: int) -> int:
    """As many as it takes to use the samples that no standing record has."""
    sizes = [end - first for first, end in (commit["samples"] for commit in record.commits if "samples" in commit)]
    return math.ceil(lost_samples / median(sizes)) if lost_samples else 0


def _redone(record: Record) -> int:
    """The most that one rank computed again."""
    by_rank: dict[int, list[int]] = {}
    for event in record.ranks_said("step"):
        by_rank.setdefault(int(event["rank"]), []).append(int(event["step"]))
    return max((len(steps) - len(set(steps)) for steps in by_rank.values()), default=0)


def _slower(record: Record, first: float, last: float) -> float | None:
    steps = [(float(event["time"]), float(event["step_s"])) for event in record.ranks_said("step")]
    before, after = [s for at, s in steps if at < first], [s for at, s in steps if at > last]
    return median(after) / median(before) if before and after else None


def _resumed_behind(record: Record, after: float) -> int | None:
    starts = [event for event in record.ranks_said("start") if event["time"] > after and "resumed_from" in event]
    if not starts:
        return None
    last = max(starts, key=lambda event: float(event["time"]))
    done = [int(each["step"]) for each in record.commits if "step" in each and each["time"] < last["time"]]
    return max(done, default=0) - int(last["resumed_from"] or 0)


def _times(events: Iterable[Event]) -> list[float]:
    return [float(event["time"]) for event in events if "time" in event]


def _first_after(moment: float, times: Iterable[float]) -> float | None:
    return min((time for time in times if time > moment), default=None)


def _since(moment: float, time: float | None) -> float | None:
    return None if time is None else time - moment

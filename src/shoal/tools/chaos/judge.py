"""Measure a run from its events, and judge the figures against what a scenario expects. Pure functions.

All times are of one machine's clock: an emulated node has no other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from shoal.control.membership.types import NEVER, Ballot, read_ballot
from shoal.events import Event
from shoal.records.commit_log import check_ledger
from shoal.tools.chaos.scenario import ChaosScenario, Expect, RunEnding, ScenarioRecord

_STOPPED = 130


class Assertion(BaseModel):
    """One condition that had to hold."""

    model_config = ConfigDict(frozen=True)

    name: str
    ok: bool
    seen: str  # the value that was observed


def judge(
    scenario: ChaosScenario, measured: ScenarioTimes, ending: RunEnding, is_script: bool = False
) -> list[Assertion]:
    """Judge one run of a scenario.

    The times of the scenarios are those of a GPT whose step takes milliseconds. The step of a user's script may take
    much longer: the one that was interrupted is computed again, so two of them are allowed on top.
    """
    if ending.trouble:
        return [Assertion(name="the scenario is played to its end", ok=False, seen=ending.trouble)]
    expect = scenario.expect
    return [
        *_judge_times(expect, measured, ending, 2 * (measured.step_s or 0.0) if is_script else 0.0),
        *_judge_counts(expect, measured),
        *_judge_sentences(expect, measured),
        *_judge_command(expect, ending),
        *(_judge_invariants(scenario, measured, ending) if scenario.trains else ()),
    ]


def _judge_times(expect: Expect, measured: ScenarioTimes, ending: RunEnding, two_steps_s: float) -> Iterator[Assertion]:
    def with_steps(within_s: float | None) -> float | None:
        return None if within_s is None else round(within_s + two_steps_s, 2)

    for name, within_s, took_s in (
        ("detected", expect.detect_within_s, measured.detect_s),
        ("regrouped", expect.regroup_within_s, measured.regroup_s),
        ("next step", with_steps(expect.next_step_within_s), measured.next_step_s),
        ("next commit", with_steps(expect.next_commit_within_s), measured.next_commit_s),
        ("rejoined", expect.rejoin_within_s, measured.rejoin_s),
        ("pause at the return", expect.return_pause_within_s, measured.return_pause_s),
        ("paused", expect.pause_within_s, measured.pause_s),
        ("stopped", expect.stop_within_s, ending.stop_s),
    ):
        if within_s is not None:
            seen = "never" if took_s is None else f"{took_s:.2f} s"
            yield Assertion(
                name=f"{name} within {within_s:g} s", ok=took_s is not None and took_s <= within_s, seen=seen
            )


def _judge_counts(expect: Expect, measured: ScenarioTimes) -> Iterator[Assertion]:
    for name, expected, count in (
        ("reconfigurations", expect.reconfigurations, measured.reconfigurations),
        ("members at the end", expect.members, measured.members),
        ("abandoned lineages", expect.abandoned, measured.abandoned),
    ):
        if expected is not None:
            yield Assertion(name=f"{name}: {expected}", ok=count == expected, seen=str(count))
    for name, most, value in (
        ("reconfigurations", expect.most_reconfigurations, measured.reconfigurations),
        ("times slower", expect.slower_at_most, measured.slower),
        ("steps behind when resumed", expect.resumed_behind_at_most, measured.resumed_behind),
    ):
        if most is not None:
            seen = "unknown" if value is None else f"{value:.3g}"
            yield Assertion(name=f"{name}: at most {most:g}", ok=value is not None and value <= most, seen=seen)


def _judge_sentences(expect: Expect, measured: ScenarioTimes) -> Iterator[Assertion]:
    if expect.sentence is not None:
        match = next((text for text in measured.sentences if re.search(expect.sentence, text)), None)
        seen = match or "; ".join(measured.sentences) or "nothing was shown"
        yield Assertion(name=f"the user read /{expect.sentence}/", ok=match is not None, seen=seen)
    if expect.sentence_within_steps is not None:
        after = [steps for text, steps in measured.warned if re.search(expect.sentence or "", text)]
        ok = bool(after) and after[0] <= expect.sentence_within_steps
        name = f"within {expect.sentence_within_steps} steps"
        yield Assertion(name=name, ok=ok, seen=f"after {after[0]}" if after else "never")


def _judge_command(expect: Expect, ending: RunEnding) -> Iterator[Assertion]:
    if not ending.answers:
        return
    last = ending.answers[-1]
    if expect.command_code is not None:
        yield Assertion(
            name=f"the command ended with {expect.command_code}",
            ok=last.code == expect.command_code,
            seen=str(last.code),
        )
    if expect.command_prints is not None:
        match = next((line for line in last.text.splitlines() if re.search(expect.command_prints, line)), None)
        yield Assertion(
            name=f"it printed /{expect.command_prints}/", ok=match is not None, seen=(match or last.text[-300:]).strip()
        )
    if expect.command_within_s is not None:
        yield Assertion(
            name=f"it answered within {expect.command_within_s:g} s",
            ok=last.seconds <= expect.command_within_s,
            seen=f"{last.seconds:.2f} s",
        )


def _judge_invariants(scenario: ChaosScenario, measured: ScenarioTimes, ending: RunEnding) -> Iterator[Assertion]:
    expect = scenario.expect
    code = expect.exit_code if expect.exit_code is not None else (0 if scenario.ends_by_itself else _STOPPED)
    if expect.has_supervisor:
        yield Assertion(name=f"exit code {code}", ok=ending.exit_code == code, seen=str(ending.exit_code))
    for name, most, count in (
        ("steps lost", 0, measured.lost_steps),
        ("samples lost", 0, measured.lost_samples),
        ("stale commits", expect.stale_commits, measured.stale_commits),
    ):
        yield Assertion(name=f"{name}: {most}", ok=count <= most, seen=str(count))
    # A ledger that ends too early has no gap, so its length is checked as well.
    least = scenario.training["train"]["steps"] if scenario.ends_by_itself and code == 0 else 1
    name = f"the ledger has {least} steps" + ("" if scenario.ends_by_itself and code == 0 else " or more")
    yield Assertion(name=name, ok=measured.committed >= least, seen=str(measured.committed))
    yield Assertion(name="every sample used once", ok=measured.ledger_ok, seen="yes" if measured.ledger_ok else "no")
    if expect.verified:
        errors = ending.verified
        seen = "not run" if errors is None else "; ".join(errors) or "yes"
        yield Assertion(name="shoal verify passes", ok=errors == (), seen=seen)
    if code in (0, _STOPPED):
        described = {True: f"{ending.replicas} equal", False: f"{ending.replicas} differ", None: "nothing to compare"}
        equal = ending.replicas_equal
        yield Assertion(name="replicas equal to the bit", ok=equal is True, seen=described[equal])
        if expect.whole_checkpoints:
            yield Assertion(name="no torn checkpoint left", ok=not ending.torn, seen=", ".join(ending.torn) or "none")
    yield Assertion(name="nothing left after 5 s", ok=not ending.left, seen=", ".join(ending.left) or "nothing")


class ScenarioTimes(BaseModel):
    """The figures of one run. Seconds count from the first injection; None for what never happened."""

    model_config = ConfigDict(frozen=True)

    detect_s: float | None = None
    regroup_s: float | None = None
    next_step_s: float | None = None  # of a run that did not regroup: its longest time without a step
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
    step_s: float | None = None  # the median step before the first injection
    slower: float | None = None  # the median step after the last injection over that before the first
    resumed_behind: int | None = None  # committed steps that were repeated after the last resume
    ledger_ok: bool = True
    sentences: tuple[str, ...] = ()
    warned: tuple[tuple[str, int], ...] = ()  # the ranks' warnings, and how many steps after the first injection


def measure(record: ScenarioRecord) -> ScenarioTimes:
    if not record.injected:
        return ScenarioTimes()
    first, last = (float(record.injected[i]["time"]) for i in (0, -1))
    regrouped = _regrouped(record, first)
    ledger = check_ledger(record.commits)
    lost_samples = sum(end - begin for begin, end in ledger.gaps)
    steps = sorted(float(event["time"]) for event in record.rank_events("step"))
    pause = longest_pause(steps, first, record.asked_at)
    regroup, newest = _formed(regrouped), newest_generation(record)
    return ScenarioTimes(
        detect_s=_since(first, _first_after(first, _signs_of_loss(record))),
        regroup_s=_since(first, regroup),
        next_step_s=pause if regroup is None else _since(first, _first_after(regroup, steps)),
        next_commit_s=_since(first, _first_after(regroup or first, _event_times(record.commits))),
        rejoin_s=_since(last, rejoined_at(record, last)),
        pause_s=_since(first, _first_after(first, _event_times(record.agent_events("pause")))),
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
        step_s=_step_before(record, first),
        slower=_slower(record, first, last),
        resumed_behind=_resumed_behind(record, first),
        ledger_ok=ledger.ok,
        sentences=find_sentences(record, first),
        warned=find_warnings(record, first),
    )


def count_stale(commits: Sequence[Event]) -> int:
    """Count commits of a generation older than that of an earlier line, separately for each lineage."""
    newest: dict[str, Ballot] = {}
    stale = 0
    for commit in commits:
        if "generation" not in commit:
            continue
        lineage, generation = str(commit.get("lineage")), read_ballot(str(commit["generation"]))
        stale += generation < newest.get(lineage, NEVER)
        newest[lineage] = max(generation, newest.get(lineage, NEVER))
    return stale


def longest_pause(steps: Sequence[float], after: float, until: float | None = None) -> float | None:
    """Return the longest time between two steps of any rank, also from the last step to `until`.

    The gap in which the injection fell counts from its beginning.
    """
    moments = [*(step for step in steps if until is None or step < until), *([until] if until is not None else [])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments) if later > after]
    return max(gaps, default=None)


def find_sentences(record: ScenarioRecord, after: float) -> tuple[str, ...]:
    """Return what the user was shown: the supervisor's notes and its result, the ranks' warnings, and resumed steps."""
    supervisor = [event for event in record.supervisor if event["time"] > after]
    notes = [str(event["text"]) for event in supervisor if event.get("event") == "note"]
    warnings = [str(event["seen"]) for event in record.rank_events("warning") if event["time"] > after]
    starts = [event for event in record.rank_events("start") if event["time"] > after and event.get("resumed_from")]
    resumed = [f"continues after step {event['resumed_from']}" for event in starts]
    ends = [str(event["seen"]) for event in supervisor if event.get("event") == "ended" and event.get("seen")]
    return tuple(dict.fromkeys([*notes, *warnings, *resumed, *ends]))


def find_warnings(record: ScenarioRecord, after: float) -> tuple[tuple[str, int], ...]:
    done = max((int(event["step"]) for event in record.rank_events("step") if event["time"] <= after), default=0)
    warnings = [event for event in record.rank_events("warning") if event["time"] > after and "step" in event]
    return tuple((str(event["seen"]), int(event["step"]) - done) for event in warnings)


def _regrouped(record: ScenarioRecord, after: float) -> list[Event]:
    """Return the memberships since the injection, without those of a launch."""
    memberships = record.rank_events("membership")
    return [event for event in memberships if event["time"] > after and event.get("how") != "first"]


def has_regrouped(record: ScenarioRecord, after: float) -> bool:
    """Tell whether the ranks have done a step in a generation that formed after a moment."""
    formed = _formed(_regrouped(record, after))
    return formed is not None and any(float(event["time"]) > formed for event in record.rank_events("step"))


def _formed(regrouped: Sequence[Event]) -> float | None:
    """Return when the last rank of the first new generation had entered it."""
    if not regrouped:
        return None
    first = min(regrouped, key=lambda event: float(event["time"]))["generation"]
    return max(float(event["time"]) for event in regrouped if event["generation"] == first)


def _signs_of_loss(record: ScenarioRecord) -> list[float]:
    failed = [event for event in record.agent_events("ended") if event.get("code")]
    return _event_times(
        [
            *record.rank_events("lost", "fault"),
            *record.agent_events("lost", "closed", "group-failed", "pause", "announce"),
            *failed,
        ]
    )


def _lost_steps(record: ScenarioRecord, lost_samples: int) -> int:
    """Return how many steps it takes to use the samples that no valid commit has."""
    sizes = [end - first for first, end in (commit["samples"] for commit in record.commits if "samples" in commit)]
    return math.ceil(lost_samples / median(sizes)) if lost_samples else 0


def _redone(record: ScenarioRecord) -> int:
    """Return the most steps that one rank computed again."""
    by_rank: dict[int, list[int]] = {}
    for event in record.rank_events("step"):
        by_rank.setdefault(int(event["rank"]), []).append(int(event["step"]))
    return max((len(steps) - len(set(steps)) for steps in by_rank.values()), default=0)


def _slower(record: ScenarioRecord, first: float, last: float) -> float | None:
    steps = [(float(event["time"]), float(event["step_s"])) for event in record.rank_events("step")]
    before, after = _step_before(record, first), [s for at, s in steps if at > last]
    return median(after) / before if before and after else None


def _step_before(record: ScenarioRecord, moment: float) -> float | None:
    steps = [float(event["step_s"]) for event in record.rank_events("step") if float(event["time"]) < moment]
    return median(steps) if steps else None


def _resumed_behind(record: ScenarioRecord, after: float) -> int | None:
    starts = [event for event in record.rank_events("start") if event["time"] > after and "resumed_from" in event]
    if not starts:
        return None
    last = max(starts, key=lambda event: float(event["time"]))
    done = [int(commit["step"]) for commit in record.commits if "step" in commit and commit["time"] < last["time"]]
    return max(done, default=0) - int(last["resumed_from"] or 0)


def _event_times(events: Iterable[Event]) -> list[float]:
    return [float(event["time"]) for event in events if "time" in event]


def _first_after(moment: float, times: Iterable[float]) -> float | None:
    return min((time for time in times if time > moment), default=None)


def _since(moment: float, time: float | None) -> float | None:
    return None if time is None else time - moment


def ranks_that_ended(record: ScenarioRecord) -> list[Event]:
    """Return the `end` events of the ranks whose last event is one."""
    last = {event.get("rank"): event for event in record.ranks}
    return [event for event in last.values() if event.get("event") == "end"]


def compare_digests(record: ScenarioRecord, every: int) -> tuple[bool | None, int]:
    """Tell from the ranks' own comparisons, after each `every` steps, whether replicas were equal, and how many.

    None where the newest generation has not compared yet.
    """
    if record.rank_events("divergence"):
        return False, 0
    newest = newest_generation(record)
    if newest is None:
        return None, 0
    size, began = int(newest["size"]), int(newest["step"])
    if size > 1 and record.furthest_step // every <= began // every:
        return None, 0
    return True, size


def newest_generation(record: ScenarioRecord) -> Event | None:
    """Return the membership event of the newest generation that a rank entered."""
    return max(record.rank_events("membership"), key=lambda event: read_ballot(str(event["generation"])), default=None)


def rejoined_at(record: ScenarioRecord, after: float) -> float | None:
    """Return when the first lost rank trained again: by joining the others, or from a checkpoint with all of them."""
    joined = (event for event in record.rank_events("membership") if event.get("how") in ("joined", "recovered"))
    return min((float(event["time"]) for event in joined if event["time"] > after), default=None)

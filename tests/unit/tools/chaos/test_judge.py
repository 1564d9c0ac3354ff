"""Measurements from a run's events, and the assertions about them, on lists of events as runs write them."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.events import Event
from shoal.tools.chaos.judge import (
    Assertion,
    ScenarioTimes,
    compare_digests,
    count_stale,
    has_regrouped,
    judge,
    longest_pause,
    measure,
    ranks_that_ended,
)
from shoal.tools.chaos.run import percentiles
from shoal.tools.chaos.scenario import ChaosScenario, CommandResult, RunEnding, ScenarioRecord, parse_scenario

FAULT_AT = 100.0


def step(rank: int, number: int, at: float) -> Event:
    return {"event": "step", "rank": rank, "step": number, "time": at, "step_s": 0.1}


def commit(number: int, at: float, generation: str = "1-0", **more: Any) -> Event:
    samples = [12 * (number - 1), 12 * number]
    return {"step": number, "samples": samples, "generation": generation, "lineage": "1-0", "time": at, **more}


def member(rank: int, at: float, generation: str, size: int, how: str = "regrouped") -> Event:
    fields = {"generation": generation, "size": size, "how": how}
    return {"event": "membership", "rank": rank, "time": at, **fields}


def surviving_run() -> ScenarioRecord:
    """Record a run: rank 2 is killed in step 6; 0 and 1 regroup, redo the step and continue; rank 2 rejoins."""
    record = ScenarioRecord()
    record.injected = [{"event": "injected", "time": FAULT_AT, "fault": "kill-rank rank 2"}]
    for rank in range(3):
        record.ranks += [member(rank, 99.0, "1-0", 3, "first")]
        record.ranks += [step(rank, number, 99.0 + number / 10) for number in range(1, 6)]
    for rank in range(2):
        record.ranks += [
            {"event": "lost", "rank": rank, "time": 100.05 + rank / 100},
            member(rank, 100.3 + rank / 10, "2-0", 2),
            *(step(rank, number, 100.0 + number / 10) for number in range(6, 9)),
        ]
    record.ranks += [member(rank, 103.0, "3-0", 3, "joined" if rank == 2 else "regrouped") for rank in range(3)]
    record.agents = [{"event": "ended", "node": "node3", "time": 100.04, "code": -9}]
    record.commits = [commit(number, 99.1 + number / 10) for number in range(1, 6)]
    record.commits += [commit(number, 100.1 + number / 10, "2-0") for number in range(6, 8)]
    record.supervisor = [
        {"event": "note", "time": 90.0, "text": "before"},
        {"event": "note", "time": 100.4, "text": "rank 2 on node3 was killed; 2 of 3 go on"},
    ]
    return record


def test_times_are_measured_from_the_fault() -> None:
    measured = measure(surviving_run())
    assert measured.detect_s == pytest.approx(0.04)
    assert measured.regroup_s == pytest.approx(0.4)
    assert measured.next_step_s == pytest.approx(0.6)
    assert measured.next_commit_s == pytest.approx(0.7)
    assert measured.rejoin_s == pytest.approx(3.0)
    assert measured.reconfigurations == 2
    assert measured.members == 3


@pytest.mark.parametrize(("until", "regrouped"), [(100.1, False), (100.35, False), (100.45, False), (100.7, True)])
def test_ranks_have_regrouped_when_they_have_done_a_step_in_the_new_generation(until: float, regrouped: bool) -> None:
    record = surviving_run()
    record.ranks = [event for event in record.ranks if event["time"] <= until]
    assert has_regrouped(record, FAULT_AT) is regrouped


def test_nothing_is_lost_and_the_user_gets_a_sentence() -> None:
    measured = measure(surviving_run())
    assert (measured.lost_steps, measured.lost_samples, measured.stale_commits, measured.redone_steps) == (0, 0, 0, 0)
    assert measured.ledger_ok
    assert measured.sentences == ("rank 2 on node3 was killed; 2 of 3 go on",)


def test_warnings_resumes_and_the_final_error_are_sentences_too() -> None:
    record = surviving_run()
    record.ranks += [
        {"event": "warning", "rank": 0, "time": 101.0, "seen": "the checkpoint could not be written", "fix": "df -h"},
        {"event": "start", "rank": 0, "time": 102.0, "resumed_from": 100},
        {"event": "start", "rank": 1, "time": 102.0, "resumed_from": 100},
    ]
    record.supervisor += [{"event": "ended", "time": 103.0, "code": 3, "seen": "rank 1 was killed"}]
    assert measure(record).sentences[1:] == (
        "the checkpoint could not be written",
        "continues after step 100",
        "rank 1 was killed",
    )


def test_a_hole_in_the_ledger_is_detected() -> None:
    record = surviving_run()
    del record.commits[3]
    measured = measure(record)
    assert (measured.lost_steps, measured.lost_samples, measured.ledger_ok) == (1, 12, False)


def test_a_redone_step_is_counted() -> None:
    record = surviving_run()
    record.ranks += [step(0, 8, 104.0), step(1, 8, 104.0)]
    assert measure(record).redone_steps == 1


def test_without_a_new_generation_the_longest_pause_is_measured() -> None:
    record = ScenarioRecord(injected=[{"time": FAULT_AT}])
    record.ranks = [step(0, number, at) for number, at in enumerate((99.0, 99.9, 101.5, 101.6), start=1)]
    measured = measure(record)
    assert measured.next_step_s == pytest.approx(1.6)
    assert (measured.regroup_s, measured.reconfigurations, measured.detect_s) == (None, 0, None)


def test_a_run_that_hangs_until_the_stop_request_has_paused() -> None:
    """A step that was in flight at the fault does not show that a rank continued."""
    record = ScenarioRecord(injected=[{"time": FAULT_AT}])
    record.ranks = [step(0, number, at) for number, at in enumerate((99.0, 99.9, 100.05), start=1)]
    record.asked_at = 108.0
    assert measure(record).next_step_s == pytest.approx(7.95)
    # A step after the stop request does not count.
    record.ranks.append(step(0, 4, 108.5))
    assert measure(record).next_step_s == pytest.approx(7.95)


def test_a_ledger_that_ends_too_early_is_detected() -> None:
    record = surviving_run()
    record.commits = record.commits[:-1]
    assert failed(judge(scenario(), measure(record), WELL)) == ["the ledger has 7 steps"]
    record.commits = []
    assert failed(judge(scenario(), measure(record), WELL)) == ["the ledger has 7 steps"]


def test_a_pause_before_the_fault_does_not_count() -> None:
    assert longest_pause([1.0, 9.0, 9.5, 9.7], after=9.1) == pytest.approx(0.5)
    assert longest_pause([1.0], after=0.0) is None


def test_a_run_that_never_continued_has_no_times() -> None:
    record = surviving_run()
    record.ranks = [event for event in record.ranks if event["time"] < FAULT_AT]
    record.commits = record.commits[:4]
    measured = measure(record)
    assert (measured.next_step_s, measured.next_commit_s) == (None, None)


def test_commits_of_an_old_generation_are_stale() -> None:
    commits = [commit(1, 1.0, "1-0"), commit(2, 2.0, "4-1"), commit(3, 3.0, "1-0"), commit(4, 4.0, "10-0")]
    assert count_stale(commits) == 1


def test_commits_of_two_parallel_lineages_are_not_stale() -> None:
    first, second = {"lineage": "2-0"}, {"lineage": "2-1"}
    commits = [commit(3, 1.0, "2-1") | second, commit(3, 2.0, "2-0") | first, commit(4, 3.0, "3-1") | second]
    assert count_stale(commits) == 0
    assert count_stale([*commits, commit(5, 4.0, "2-1") | second]) == 1


def test_slowness_is_relative_to_the_time_before_the_fault() -> None:
    record = surviving_run()
    record.ranks += [{**step(0, 9, 105.0), "step_s": 0.3}] * 20
    assert measure(record).slower == pytest.approx(3.0)


SCENARIO = {
    "name": "x",
    "row": 1,
    "text": "x",
    "training": {"train": {"steps": 7}},
    "steps": [{"at_step": 5, "do": "kill-rank", "rank": 2}],
}


def ended(code: int | None, equal: bool | None, replicas: int, **more: Any) -> RunEnding:
    return RunEnding(code, equal, replicas, **{"verified": (), **more})


WELL = ended(0, True, 3)


def scenario(**expect: Any) -> ChaosScenario:
    return parse_scenario({**SCENARIO, "expect": expect}, "x")


def failed(assertions: list[Assertion]) -> list[str]:
    return [assertion.name for assertion in assertions if not assertion.ok]


def test_every_expectation_holds_for_a_surviving_run() -> None:
    expectations = {"next_step_within_s": 1.0, "members": 3, "reconfigurations": 2, "sentence": "rank 2.*killed"}
    assertions = judge(scenario(**expectations), measure(surviving_run()), WELL)
    assert failed(assertions) == []
    assert len(assertions) == 14


@pytest.mark.parametrize(
    ("expect", "name", "seen"),
    [
        ({"next_step_within_s": 0.5}, "next step within 0.5 s", "0.60 s"),
        ({"pause_within_s": 5}, "paused within 5 s", "never"),
        ({"members": 2}, "members at the end: 2", "3"),
        ({"reconfigurations": 0}, "reconfigurations: 0", "2"),
        ({"most_reconfigurations": 1}, "reconfigurations: at most 1", "2"),
        ({"sentence": "node9"}, "the user read /node9/", "rank 2 on node3 was killed; 2 of 3 go on"),
        ({"exit_code": 130}, "exit code 130", "0"),
        ({"abandoned": 1}, "abandoned lineages: 1", "0"),
        ({"return_pause_within_s": 0.3}, "pause at the return within 0.3 s", "1.10 s"),
        ({"resumed_behind_at_most": 4}, "steps behind when resumed: at most 4", "unknown"),
    ],
)
def test_a_failed_expectation_is_named_with_the_measured_value(expect: dict[str, Any], name: str, seen: str) -> None:
    broken = [assertion for assertion in judge(scenario(**expect), measure(surviving_run()), WELL) if not assertion.ok]
    assert [(assertion.name, assertion.seen) for assertion in broken] == [(name, seen)]


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        (ended(3, True, 3), "exit code 0"),
        (ended(None, True, 3), "exit code 0"),
        (ended(0, False, 3), "replicas equal to the bit"),
        (ended(0, None, 0), "replicas equal to the bit"),
        (ended(0, True, 3, left=("agent on node2 (7)",)), "nothing left after 5 s"),
        (ended(0, True, 3, torn=(".step-00000050.tmp",)), "no torn checkpoint left"),
        (ended(0, True, 3, verified=("commits.jsonl: was cut",)), "shoal verify passes"),
        (ended(0, True, 3, verified=None), "shoal verify passes"),
        (ended(0, True, 3, trouble="the run ended before"), "the scenario is played to its end"),
    ],
)
def test_the_ending_of_a_run_is_always_checked(ending: RunEnding, name: str) -> None:
    assert failed(judge(scenario(), measure(surviving_run()), ending)) == [name]


@pytest.mark.parametrize(("resumed_from", "behind"), [(7, 0), (4, 3)])
def test_the_distance_of_a_resume_from_the_end_of_the_ledger_is_measured(resumed_from: int, behind: int) -> None:
    record = surviving_run()
    record.ranks += [{"event": "start", "rank": rank, "time": 110.0, "resumed_from": resumed_from} for rank in range(3)]
    record.commits.append(commit(8, 111.0, "4-0"))
    assert measure(record).resumed_behind == behind


def test_a_run_without_a_number_of_steps_may_be_stopped() -> None:
    endless = parse_scenario({**SCENARIO, "training": {}}, "x")
    one_commit = ScenarioTimes(committed=1)
    assert failed(judge(endless, one_commit, ended(130, True, 3))) == []
    assert failed(judge(endless, one_commit, ended(130, None, 0))) == ["replicas equal to the bit"]
    assert failed(judge(endless, ScenarioTimes(), ended(130, True, 3))) == ["the ledger has 1 steps or more"]


def test_a_command_is_checked_by_code_output_and_time() -> None:
    expectations = {"command_code": 1, "command_prints": "blocked", "command_within_s": 2}
    description = {
        **SCENARIO,
        "trains": False,
        "training": {},
        "steps": [{"do": "shoal", "words": ["doctor"]}],
        "expect": expectations,
    }
    check = parse_scenario(description, "x")
    good = RunEnding(None, None, 0, answers=(CommandResult(1, "one\nnode1 is blocked\n", 1.0),))
    assert failed(judge(check, ScenarioTimes(), good)) == []
    bad = RunEnding(None, None, 0, answers=(CommandResult(0, "all well", 3.0),))
    assert len(failed(judge(check, ScenarioTimes(), bad))) == 3


def test_replicas_of_a_stopped_run_are_compared_by_their_digests() -> None:
    record = ScenarioRecord(ranks=[{**member(0, 1.0, "1-0", 3, "first"), "step": 0}, step(0, 19, 2.0)])
    assert compare_digests(ScenarioRecord(), every=20) == (None, 0)
    assert compare_digests(record, every=20) == (None, 0)
    record.ranks.append(step(0, 21, 2.1))
    assert compare_digests(record, every=20) == (True, 3)
    record.ranks.append({**member(0, 3.0, "10-0", 2), "step": 22})
    assert compare_digests(record, every=20) == (None, 0)
    record.ranks.append(step(0, 40, 4.0))
    assert compare_digests(record, every=20) == (True, 2)
    record.ranks.append({"event": "divergence", "rank": 0, "step": 40, "time": 4.1})
    assert compare_digests(record, every=20) == (False, 0)


def test_only_ranks_that_ended_are_compared() -> None:
    record = surviving_run()
    record.ranks += [{"event": "end", "rank": 0, "time": 110.0}, {"event": "end", "rank": 1, "time": 110.0}]
    assert sorted(event["rank"] for event in ranks_that_ended(record)) == [0, 1]


def test_percentiles_are_measured_values() -> None:
    times = percentiles([float(number) for number in range(1, 21)])
    assert times is not None
    assert (times.p50, times.p95, times.worst, times.count) == (10.0, 19.0, 20.0, 20)
    assert percentiles([]) is None


def test_a_script_may_take_two_of_its_own_steps_longer() -> None:
    scenario = parse_scenario(
        {"name": "x", "row": 1, "text": "x", "steps": [{"do": "heal"}], "expect": {"next_step_within_s": 0.5}}, "x"
    )
    measured = measure(surviving_run())
    assert measured.step_s == pytest.approx(0.1)
    ending = RunEnding(exit_code=130, replicas_equal=True, replicas=3, verified=())

    def next_step(is_script: bool) -> Assertion:
        assertions = judge(scenario, measured, ending, is_script)
        return next(assertion for assertion in assertions if assertion.name.startswith("next step"))

    assert (next_step(False).name, next_step(False).ok) == ("next step within 0.5 s", False)
    assert (next_step(True).name, next_step(True).ok) == ("next step within 0.7 s", True)

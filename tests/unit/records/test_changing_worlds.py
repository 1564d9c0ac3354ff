"""Figures, members and replicas of runs whose ranks joined and left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.errors import DataError
from shoal.events import Event
from shoal.records.final_states import judge_replicas
from shoal.records.history import last_members
from shoal.records.rank_log import read_rank_logs
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder
from tests.support.member_samples import entered, killed_and_rejoined, parted, steps, time_of
from tests.support.run_samples import TOKENS, end, make_run, rank_events, start


def members(events: list[Event]) -> tuple[int, ...]:
    return last_members(read_rank_logs(events))


def test_figures_are_those_of_the_last_world_size() -> None:
    summary = summarize(killed_and_rejoined())
    assert (summary.status, summary.world_size, summary.members) == ("finished", 3, (0, 1, 2))
    assert summary.step_s is not None
    assert summary.step_s.median == summary.step_s.p95 == 0.3, "the slower steps of two ranks do not count"
    assert summary.tokens_per_s == pytest.approx(TOKENS / 0.3)
    assert (summary.steps_done, summary.loss_steps.tolist()) == (100, list(range(1, 101)))


def test_a_world_with_few_steps_gives_no_figures() -> None:
    """Rank 1 was lost five steps before the end: the figures are those of two ranks."""
    events: list[Event] = []
    for rank in (0, 1):
        events += [start(rank, 2), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 55, step_s=0.3)]
    events += [entered(0, "2-0", (0,), 55), *steps(0, 56, 60, step_s=0.1), end(0, 60)]
    summary = summarize(events)
    assert (summary.status, summary.world_size, summary.members) == ("finished", 2, (0,))
    assert summary.step_s is not None
    assert summary.step_s.median == 0.3
    assert summary.measured == (28, 55)
    assert summary.steps_done == 60


def test_a_late_rank_counts_with_its_own_steps() -> None:
    events = [start(0, 1), entered(0, "1-0", (0,), 0, how="first"), *steps(0, 1, 300)]
    events += [entered(0, "2-0", (0, 7), 300), *steps(0, 301, 340), end(0, 340)]
    events += [start(7, 2, time=time_of(299)), entered(7, "2-0", (0, 7), 300, how="joined"), *steps(7, 301, 340)]
    summary = summarize([*events, end(7, 340)])
    assert (summary.status, summary.world_size, summary.members) == ("finished", 2, (0, 7))
    assert summary.measured == (321, 340)
    assert summary.ranks[7].steps.tolist() == list(range(301, 341))
    assert "wait" in summary.ranks[7].phases


def test_a_rank_that_left_does_not_make_the_run_fail() -> None:
    fault = {"event": "fault", "rank": 1, "error": "RunFailed", "seen": "out of memory"}
    events: list[Event] = []
    for rank in (0, 1):
        events += [start(rank, 2), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 20)]
    events += [fault, entered(0, "2-0", (0,), 20), *steps(0, 21, 60), end(0, 60)]
    summary = summarize(events)
    assert summary.status == "finished"
    assert [fault["seen"] for fault in summary.faults] == ["out of memory"], "the fault is still reported"


def test_losses_are_those_of_the_standing_lineage() -> None:
    summary = summarize(parted())
    assert summary.loss_steps.tolist() == list(range(1, 61))
    assert summary.loss.tolist() == [3.0] * 20 + [2.0] * 20 + [1.0] * 20
    assert summary.val_loss == {}, "the only evaluation was of the abandoned lineage"


def test_the_history_marks_the_standing_generations() -> None:
    history = summarize(parted()).history
    assert [(str(entry.generation), entry.ids, entry.step, entry.stands) for entry in history] == [
        ("1-0", (0, 1), 0, True),
        ("3-0", (0,), 20, True),
        ("3-1", (1,), 20, False),
        ("5-0", (0, 1), 40, True),
    ]
    assert [entry.lost_s for entry in history] == pytest.approx([0, 0.75, 0.75, 0.75]), "a copy delays no other rank"
    assert [entry.is_first for entry in history] == [True, False, False, False]


def test_a_lineage_stands_up_to_its_abandoned_steps() -> None:
    """Rank 1 forked the first lineage; ranks 0 and 2 continued in it and joined rank 1's lineage later."""
    events: list[Event] = []
    for rank in (0, 1, 2):
        events += [start(rank, 3), entered(rank, "1-0", (0, 1, 2), 0, how="first"), *steps(rank, 1, 10, loss=3.0)]
    for rank in (0, 2):
        events += [entered(rank, "2-0", (0, 2), 10), *steps(rank, 11, 12, loss=9.0)]
        events += [entered(rank, "5-1", (0, 1, 2), 20, "3-1", "joined"), *steps(rank, 21, 30, loss=1.0)]
    events += [entered(1, "3-1", (1,), 10, "3-1"), *steps(1, 11, 20, loss=2.0)]
    events += [entered(1, "5-1", (0, 1, 2), 20, "3-1"), *steps(1, 21, 30, loss=1.0)]
    summary = summarize(events)
    assert summary.loss.tolist() == [3.0] * 10 + [2.0] * 10 + [1.0] * 10
    assert [entry.stands for entry in summary.history] == [True, False, True, True]


def test_a_resumed_launch_builds_on_the_one_before() -> None:
    """Resumed from step 8 with one rank and its own lineage; the earlier steps after step 8 do not count."""
    events: list[Event] = []
    for rank in (0, 1):
        events += [start(rank, 2), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 12, loss=3.0)]
    events += [entered(0, "4-0", (0,), 8, "4-0", "first"), start(0, 1, time=time_of(90)), *steps(0, 9, 30, loss=1.0)]
    summary = summarize(events)
    assert summary.loss.tolist() == [3.0] * 8 + [1.0] * 22
    assert [entry.stands for entry in summary.history] == [True, True]
    assert (summary.members, summary.world_size, summary.measured) == ((0,), 1, (20, 30))
    assert (set(summary.ranks), set(summary.took_part)) == ({0}, {0, 1})


def test_runs_without_membership_have_no_history() -> None:
    summary = summarize([*rank_events(0), *rank_events(1)])
    assert (summary.history, summary.members, summary.world_size) == ((), (0, 1), 2)


def test_a_plain_launch_after_one_with_membership_has_its_own_members() -> None:
    """Both orders of `start` and `membership` occur, and a restarted rank is not a new launch."""
    first = killed_and_rejoined()
    assert members(first) == (0, 1, 2)
    assert members([*first, start(1, 3, time=time_of(101))]) == (0, 1, 2)
    resumed = [start(rank, 2, time=time_of(500) + rank, resumed_from=100) for rank in (0, 1)]
    assert members([*first, *resumed]) == (0, 1)
    later = [entered(0, "9-0", (0,), 100, "9-0", "first"), start(0, 1, time=time_of(600)), *steps(0, 101, 110)]
    assert members([*first, *resumed, *later]) == (0,)
    assert summarize([*first, *resumed, *later]).ranks.keys() == {0}


def test_broken_membership_events_are_skipped() -> None:
    broken = [{"event": "membership", "rank": 0, "generation": "x"}, {"event": "membership", "rank": 0, "ids": [0, -1]}]
    assert members([start(0, 2), *broken, start(1, 2)]) == (0, 1)


def with_states(run: RunFolder, values: dict[int, float]) -> RunFolder:
    for rank, value in values.items():
        save_file({"w": np.full(4, value, np.float32)}, run.state(rank))
    return run


def test_states_of_ranks_that_left_are_not_compared(tmp_path: Path) -> None:
    events = [start(0, 3), entered(0, "2-0", (0, 7), 10), start(7, 2), entered(7, "2-0", (0, 7), 10, how="joined")]
    report = judge_replicas(with_states(make_run(tmp_path / "run", events), {0: 1.0, 2: 5.0, 7: 1.0}))
    assert (report.byte_equivalent, report.ranks, report.left_out) == (True, 2, [2])
    assert report.digests.keys() == {0, 7}


def test_a_run_resumed_on_fewer_ranks_is_judged_by_those_ranks(tmp_path: Path) -> None:
    events = [*rank_events(0), *rank_events(1), start(0, 1, time=time_of(500), resumed_from=100), end()]
    report = judge_replicas(with_states(make_run(tmp_path / "run", events), {0: 1.0, 1: 5.0}))
    assert (report.byte_equivalent, report.ranks, report.left_out) == (True, 1, [1])


def test_a_member_without_a_state_is_named_by_its_rank(tmp_path: Path) -> None:
    events = [start(0, 2), entered(0, "2-0", (0, 7), 10), start(7, 2)]
    with pytest.raises(DataError, match="rank 7 wrote no"):
        judge_replicas(with_states(make_run(tmp_path / "run", events), {0: 1.0, 1: 1.0}))


def test_on_other_machines_the_digests_of_the_members_are_compared(tmp_path: Path) -> None:
    events = [start(0, 2), entered(0, "2-0", (0, 7), 10), start(7, 2), entered(7, "2-0", (0, 7), 10, how="joined")]
    events += [{"event": "digest", "rank": rank, "sha256": "b" if rank == 3 else "a"} for rank in (0, 3, 7)]
    run = make_run(tmp_path / "run", events, "run.on=hosts:a,b")
    report = judge_replicas(with_states(run, {0: 1.0}))
    assert (report.byte_equivalent, report.ranks, report.tensors) == (True, 2, None)

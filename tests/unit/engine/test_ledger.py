"""The ledger of a run whose machines joined, left and were partitioned."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.load import build_config, change_settings, load_config
from shoal.control.rank_env import Placement
from shoal.cost.batch_plan import BatchPlan
from shoal.data.prepare import create_run, reopen_run
from shoal.engine.recorder import Recorder
from shoal.records.commit_log import check_ledger
from shoal.records.history import last_members
from shoal.records.manifest import write_derived_files
from shoal.records.rank_log import read_rank_logs
from shoal.records.summary import summarize
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder
from shoal.sync.world import unjoined_world
from shoal.units import format_spans, subtract_spans, to_spans
from tests.support.member_samples import commit_records, entered, steps
from tests.support.programs import TINY, read_jsonl
from tests.support.run_samples import all_events, make_run, start

BATCH = 24
Record = dict[str, Any]


def commits(first: int, last: int, generation: str = "1-0", lineage: str = "1-0") -> list[Record]:
    return [
        {
            "step": step,
            "samples": [BATCH * (step - 1), BATCH * step],
            "members": [0, 1],
            "generation": generation,
            "lineage": lineage,
            "loss": 1.0,
        }
        for step in range(first, last + 1)
    ]


def abandoned(lineage: str, standing: str, after: int) -> Record:
    return {"abandoned": lineage, "standing": standing, "after": after, "time": 1.0}


def interleave(*sides: list[Record]) -> list[Record]:
    longest = max(map(len, sides))
    return [side[place] for place in range(longest) for side in sides if place < len(side)]


def test_shares_must_add_up_to_the_samples_of_every_step() -> None:
    records = [record | {"shares": [18, 6] if record["step"] < 5 else [8, 16]} for record in commits(1, 9)]
    assert check_ledger(records).ok
    for wrong in ([18, 7], [24], [24, 0], [12.0, 12.0], "1212", None):
        damaged = [*records[:3], records[3] | {"shares": wrong}, *records[4:]]
        report = check_ledger(damaged)
        assert (report.ok, report.misdivided) == (False, [4])
    lacking = [*records[:8], *commits(9, 9)]
    assert check_ledger(lacking).misdivided == [9]


def test_generations_of_one_lineage_follow_each_other() -> None:
    report = check_ledger([*commits(1, 10), *commits(11, 13, "2-1"), *commits(14, 30, "4-0")])
    assert report.ok
    assert (report.steps, report.generations, report.lineages, report.redone) == (30, 3, 1, 0)


def test_lines_written_by_two_supervisors_count_once() -> None:
    first, second = commits(1, 10), commits(11, 20, "2-0")
    report = check_ledger([*interleave(first, first), *interleave(second, second[:4]), *first[3:]])
    assert report.ok
    assert (report.steps, report.samples, report.redone) == (20, 20 * BATCH, 0)


@given(st.data())
def test_copied_lines_change_nothing_at_any_position(data: st.DataObject) -> None:
    lines = [*commits(1, 8), *commits(9, 12, "3-1"), *commits(11, 20, "5-0", "5-0")]
    expected = check_ledger(lines)
    for copied in data.draw(st.lists(st.sampled_from(lines[:12]), max_size=10)):
        lines.insert(data.draw(st.integers(lines.index(copied) + 1, len(lines))), dict(copied))
    assert check_ledger(lines) == expected
    assert (expected.ok, expected.steps, expected.redone) == (True, 20, 2)


def test_a_late_line_of_an_earlier_generation_is_accepted() -> None:
    report = check_ledger([*commits(1, 9), *commits(11, 12, "2-1"), *commits(10, 10), *commits(13, 15, "2-1")])
    assert report.ok
    assert (report.steps, report.redone) == (15, 0)


def test_a_step_of_a_later_generation_is_a_redo_only_from_the_same_position() -> None:
    redo = check_ledger([*commits(1, 10), *commits(9, 12, "2-0")])
    assert (redo.ok, redo.redone, redo.steps) == (True, 2, 12)
    moved = commits(9, 12, "2-0")
    moved[0]["samples"] = [9 * BATCH, 10 * BATCH]
    assert check_ledger([*commits(1, 10), *moved]).doubles == [9]


def test_an_abandoned_lineage_does_not_count() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(11, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-1", "3-0", 10), *commits(31, 40, "5-0", "3-0")])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone, report.lineages) == (40, 5, 0, 3)


def test_the_first_lineage_may_be_the_abandoned_one() -> None:
    """The other lineage was built on step 11, which was in flight at the fork: that step stays."""
    sides = interleave(commits(12, 15), commits(12, 30, "3-2", "3-2"))
    report = check_ledger([*commits(1, 11), *sides, abandoned("1-0", "3-2", 10)])
    assert report.ok
    assert (report.steps, report.abandoned) == (30, 4)


def test_a_step_in_flight_may_be_kept_by_one_side_only() -> None:
    """Step 11 was committed by the side that had it, and redone by the side that lacked it and was abandoned later."""
    sides = interleave(commits(11, 14, "5-0", "5-0"), commits(12, 20, "6-1", "6-1"))
    report = check_ledger([*commits(1, 11), *sides, abandoned("5-0", "6-1", 10)])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone) == (20, 4, 0)


def test_the_ledger_of_a_machine_that_rejoined_is_accepted() -> None:
    """It has its own lineage first, then the lines copied from the other ledger."""
    lines = [*commits(1, 10), *commits(11, 15, "3-1", "3-1"), abandoned("3-1", "3-0", 10)]
    report = check_ledger([*lines, *commits(11, 30, "3-0", "3-0")])
    assert report.ok
    assert (report.steps, report.abandoned, report.redone) == (30, 5, 0)


def test_two_lineages_that_both_stand_are_a_fork() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(11, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides])
    assert not report.ok
    (fork,) = report.forked
    assert (set(fork.lineages), fork.first, fork.last) == ({"3-0", "3-1"}, 11, 15)
    assert (report.steps, report.gaps, report.overlaps, report.redone) == (30, [], [], 0), (
        "the longer lineage is checked"
    )


def test_a_lineage_that_branches_off_the_continued_one_is_a_fork() -> None:
    report = check_ledger([*commits(1, 11), *commits(12, 13, "3-2", "3-2"), *commits(12, 40)])
    assert [(fork.first, fork.last) for fork in report.forked] == [(12, 13)]
    assert report.steps == 40


def test_abandoning_one_of_three_lineages_leaves_a_fork() -> None:
    sides = interleave(*(commits(11, 20, name, name) for name in ("3-0", "3-1", "3-2")))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-2", "3-0", 10)])
    assert [set(fork.lineages) for fork in report.forked] == [{"3-0", "3-1"}]
    assert report.abandoned == 10


@pytest.mark.parametrize(("back_to", "redone"), [(21, 0), (15, 6), (1, 20)])
def test_a_resumed_launch_is_not_a_fork(back_to: int, redone: int) -> None:
    report = check_ledger([*commits(1, 12), *commits(13, 20, "3-1"), *commits(back_to, 30, "4-0", "4-0")])
    assert report.ok
    assert (report.steps, report.redone, report.lineages) == (30, redone, 2)


def test_launches_with_and_without_membership_may_alternate() -> None:
    plain = [{**record, "generation": 0} for record in commits(1, 10)]
    for record in plain:
        del record["lineage"]
    later = commits(18, 40, "0-0", "0-0")
    report = check_ledger([*plain, *commits(9, 20, "1-0", "1-0"), *later, *later[-5:]])
    assert report.ok
    assert (report.steps, report.redone) == (40, 2 + 3 + 5)


def test_gaps_are_checked_in_the_standing_lineages() -> None:
    sides = interleave(commits(11, 15, "3-1", "3-1"), commits(12, 30, "3-0", "3-0"))
    report = check_ledger([*commits(1, 10), *sides, abandoned("3-1", "3-0", 10)])
    assert report.gaps == [(10 * BATCH, 11 * BATCH)], (
        "two lineages that began under one number are not built on each other"
    )


@pytest.mark.parametrize(
    "line",
    [
        {"abandoned": "x", "standing": "1-0", "after": 3},
        {"abandoned": "1-0", "standing": "2-0"},
        {**commits(4, 4)[0], "generation": "seven"},
        {**commits(4, 4)[0], "lineage": [1, 0]},
    ],
)
def test_unreadable_lines_are_counted(line: Record) -> None:
    assert check_ledger([*commits(1, 3), line]).unreadable == 1


HUGE = 2**62


def test_a_huge_number_in_a_damaged_line_needs_no_memory() -> None:
    """One flipped digit must not make `shoal verify` list 2^62 steps or ranks."""
    damaged = {**commits(4, 4)[0], "step": HUGE}
    report = check_ledger([*commits(1, 3), damaged, *commits(5, 6)])
    assert not report.ok
    assert report.missing[-1][1] < HUGE
    hole = check_ledger([*commits(1, 3), {"hole": [5, HUGE]}, *commits(6, 7)])
    assert (hole.missing, hole.holes) == ([(4, 4)], [(5, 5), (8, HUGE)])
    assert len(last_members(read_rank_logs([start(0, world_size=HUGE)]))) <= 1


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(spans, spans)
def test_spans_behave_like_sets_of_numbers(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    numbers = {number for first, last in some for number in range(first, last + 1)}
    taken = {number for first, last in others for number in range(first, last + 1)}
    assert subtract_spans(some, others) == to_spans(numbers - taken)
    assert {number for first, last in to_spans(numbers) for number in range(first, last + 1)} == numbers


def test_spans_are_formatted_for_reading() -> None:
    assert format_spans(to_spans([9, 3, 7, 8])) == "3, 7 to 9"
    assert format_spans(to_spans(range(0, 20, 2))) == "0, 2, 4, 6, …"


# `shoal verify` on handwritten run folders; tests/integration/tools/test_verify.py damages real ones.


def run_of(folder: Path, events: list[Record], lines: list[Record], on: str = "local:2") -> RunFolder:
    run = make_run(folder, events, f"run.on={on}", "train.steps=1000")
    run.commits.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def wrong_in(run: RunFolder) -> list[str]:
    return [f"{finding.file}: {finding.text}" for finding in verify_run(run).findings if finding.is_wrong]


def two_ranks(last: int, **more: Any) -> list[Record]:
    both = (
        [start(rank), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, last, **more)] for rank in (0, 1)
    )
    return [event for events in both for event in events]


def resumed(rank: int, after: int, generation: str) -> list[Record]:
    restart = start(rank, resumed_from=after, time=1_790_000_500.0)
    return [restart, entered(rank, generation, (0, 1), after, generation, how="first")]


def test_a_resumed_run_that_has_not_committed_yet_passes(tmp_path: Path) -> None:
    """The lines of the steps after the checkpoint remain valid until those steps are redone."""
    events = [*two_ranks(200, loss=1.0), *(event for rank in (0, 1) for event in resumed(rank, 150, "3-0"))]
    run = run_of(tmp_path / "run", events, commit_records(1, 200, "1-0"))
    assert wrong_in(run) == []
    run = run_of(tmp_path / "longer", events, commit_records(1, 300, "1-0"))
    assert any("no more than step 200" in text for text in wrong_in(run))


def test_lines_written_twice_by_a_joined_machine_pass(tmp_path: Path) -> None:
    """A repeated step of one generation is accepted; another order is not."""
    events = [start(2, 3), entered(2, "2-0", (0, 1, 2), 20, how="joined"), *steps(2, 21, 30)]
    whole = [*commit_records(1, 20, "1-0"), *commit_records(21, 29, "2-0", members=(0, 1, 2))]
    repeated = [{**record, "time": 1.0} for record in whole[10:20]]
    run = run_of(tmp_path / "run", events, [*whole[:20], *repeated, *whole[20:]], on="join:3")
    assert wrong_in(run) == []
    whole[4], whole[5] = whole[5], whole[4]
    assert any("not in order" in text for text in wrong_in(run_of(tmp_path / "swapped", events, whole, on="join:3")))


def test_a_machine_that_joined_anew_has_the_earlier_steps_in_another_folder(tmp_path: Path) -> None:
    events = [*resumed(1, 20, "3-0"), *steps(1, 21, 30)]
    lines = [*commit_records(1, 20, "1-0"), *commit_records(21, 30, "3-0", lineage="3-0")]
    run = run_of(tmp_path / "run", events, lines, on="local:1")
    assert not any("lacks step" in text for text in wrong_in(run))
    [text] = [finding.text for finding in verify_run(run).findings if finding.file == "events/rank-1.jsonl"]
    assert text.startswith("step 1 to ")
    # A step that it did in this folder must be there.
    gap = [event for event in events if not (event["event"] == "step" and event["step"] == 22)]
    assert "events/rank-1.jsonl: lacks step 22, which the ledger has for rank 1" in wrong_in(
        run_of(tmp_path / "gap", gap, lines, on="local:1")
    )


def test_the_loss_is_compared_only_with_the_events_of_all_ranks(tmp_path: Path) -> None:
    """Rank 1 did step 20 when the others were lost, and never received the world's loss for it."""
    events = two_ranks(20, loss=1.0)
    alone = [event for event in events if event["rank"] == 1]
    alone[-1] = alone[-1] | {"loss": 7.0}
    lines = commit_records(1, 20, "1-0")
    assert wrong_in(run_of(tmp_path / "alone", alone, lines, on="join:2")) == [
        "events/rank-0.jsonl: is missing: rank 0 took part"
    ]
    both = [event for event in events if event["rank"] == 0]
    changed = [
        event | {"loss": 7.0} if event.get("step") == 20 and event["event"] == "step" else event for event in both
    ]
    run = run_of(tmp_path / "both", [*changed, *alone], lines)
    assert wrong_in(run) == ["commits.jsonl: step 20: the loss is not the one that the ranks recorded"]


def test_a_rank_records_the_losses_it_receives_after_an_interruption(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    recorder = Recorder(run, unjoined_world(Placement(0, 1, 0, 1), torch.device("cpu")))
    records = [recorder.describe(step, step - 1, BatchPlan(1, (1,)), loss=2.0) for step in (1, 2, 3, 4)]
    recorder.propose(1, 0, BatchPlan(1, (1,)), 2.0)
    for step in (1, 2, 3):
        recorder.step(step, {}, own_loss=9.0)
    records[2]["generation"] = "7-0"
    for _ in range(2):
        recorder.hold([*records[:3], records[3] | {"partial": True}])
    recorder.close()
    losses = [(event["step"], event["loss"]) for event in read_jsonl(run.events(0)) if event["event"] == "loss"]
    assert losses == [(2, 2.0)], (
        "step 1 was recorded before, step 3 is of another generation, step 4 was not done by this rank"
    )


def finished_run(folder: Path) -> RunFolder:
    """Make a run as `shoal train --steps 100` leaves it, without the states."""
    run = create_run(build_config("grammar", None, sets=[*TINY, "train.steps=100", "run.on=local:2"]), folder, 2)
    read = {"config_sha256": hashlib.sha256(run.config.read_bytes()).hexdigest(), "steps": 100}
    for event in all_events():
        with run.events(event["rank"]).open("a") as file:
            file.write(json.dumps(event | read if event["event"] == "start" else event) + "\n")
    run.supervisor.write_text(
        "".join(json.dumps({"event": name, "rank": 0, "code": 0}) + "\n" for name in ("supervising", "ended"))
    )
    write_derived_files(run)
    return run


def launch_ended(code: int) -> str:
    return f'{{"event":"supervising","rank":0}}\n{{"event":"ended","rank":0,"code":{code}}}\n'


def about_settings(run: RunFolder) -> list[str]:
    return [text for text in wrong_in(run) if text.startswith(("config.toml", "manifest.json"))]


def test_a_resume_that_never_started_a_rank_is_not_damage(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    assert about_settings(run) == []
    for planned in (500, 600):
        config, changed = change_settings(load_config(run.config), {"train": {"steps": planned}})
        reopen_run(run.path, config, changed=changed)
        run.supervisor.write_text(run.supervisor.read_text() + launch_ended(130))
        assert load_config(run.config).train.steps == planned
        assert about_settings(run) == []
        assert any("no rank has started" in finding.text for finding in verify_run(run).findings)
    run.config.write_text(run.config.read_text().replace("steps = 600", "steps = 700"))
    assert [text for text in about_settings(run) if "it was changed" in text]


def test_unchanged_settings_are_not_rewritten(tmp_path: Path) -> None:
    """A newer version may write the same settings in another way."""
    run = finished_run(tmp_path / "run")
    before = run.config.read_bytes() + b"# of an older version\n"
    run.config.write_bytes(before)
    reopen_run(run.path)
    assert run.config.read_bytes() == before
    assert [event["event"] for event in read_jsonl(run.supervisor)] == ["supervising", "ended"]


def test_steps_before_a_recovery_stand() -> None:
    """All ranks are lost after step 30 and continue from the checkpoint of step 20."""
    events = two_ranks(30, loss=3.0)
    for rank in (0, 1):
        events += [start(rank, time=1_790_000_500.0), entered(rank, "3-0", (0, 1), 20, "3-0", how="recovered")]
        events += steps(rank, 21, 40, loss=1.0)
    summary = summarize(events)
    assert summary.loss.tolist() == [3.0] * 20 + [1.0] * 20
    assert [entry.stands for entry in summary.history] == [True, True]

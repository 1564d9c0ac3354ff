"""A machine's copy of the ledger when it comes back or changes sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.load import build_config, load_config
from shoal.control.membership.types import Ballot
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import AbandonCommits
from shoal.data.prepare import create_run
from shoal.events import EventLog
from shoal.run_folder import RunFolder
from shoal.sync.world import World, unjoined_world
from shoal.tools.report.commit_log import check_ledger
from shoal.train import recorder as train_recorder
from shoal.train import state_transfer
from shoal.train.build import build_trainer
from shoal.train.recorder import Recorder
from shoal.train.trainer import StopRequest
from tests.support.programs import TINY, read_jsonl
from tests.support.ranks import run_ranks
from tests.support.runs import no_file_beyond

LEFT, RIGHT = Ballot(2, 0), Ballot(2, 1)
GIVEN_UP = AbandonCommits(lineage=LEFT, surviving=RIGHT, shared_step=2)


def record(step: int, generation: str, lineage: str = "1-0") -> dict[str, Any]:
    return {"step": step, "samples": [step - 1, step], "generation": generation, "lineage": lineage, "time": 1.0}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_what_is_missing_is_added_and_what_is_there_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"))
    train_recorder.add_missing(EventLog(path, 0), [record(2, "1-0"), record(3, "4-0")])
    assert [(each["step"], each["generation"]) for each in read_jsonl(path)] == [(1, "1-0"), (2, "1-0"), (3, "4-0")]


def test_a_lineage_is_given_up_once_however_many_say_so(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-0", "2-0"), record(3, "2-1", "2-1"))
    for _ in range(2):
        train_recorder.mark_abandoned(EventLog(path, 0), [GIVEN_UP])
    [line] = [each for each in read_jsonl(path) if "abandoned" in each]
    assert (line["abandoned"], line["standing"], line["after"]) == ("2-0", "2-1", 2)


def test_a_copy_that_has_nothing_of_a_lineage_need_not_know_that_it_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-1", "2-1"))
    train_recorder.mark_abandoned(EventLog(path, 0), [GIVEN_UP])
    assert not [each for each in read_jsonl(path) if "abandoned" in each]


def test_a_new_machine_has_no_ledger_yet(tmp_path: Path) -> None:
    path = tmp_path / "commits.jsonl"
    assert train_recorder.last_step(path) == 0
    train_recorder.mark_abandoned(EventLog(path, 0), [GIVEN_UP])
    train_recorder.add_missing(EventLog(path, 0), [record(1, "1-0")])
    assert train_recorder.last_step(path) == 1


def test_only_what_is_missing_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"))
    assert train_recorder.missing_records(path, [record(2, "1-0"), record(3, "1-0")]) == [record(3, "1-0")]
    assert train_recorder.missing_records(path, [record(2, "2-0")]) == [record(2, "2-0")]
    assert train_recorder.missing_records(tmp_path / "none", [record(1, "1-0")]) == [record(1, "1-0")]


def test_of_a_long_ledger_the_end_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", *(record(step, "1-0") for step in range(1, 12_000)))
    assert path.stat().st_size > 1 << 20
    assert train_recorder.missing_records(path, [record(11_999, "1-0"), record(12_000, "1-0")]) == [
        record(12_000, "1-0")
    ]


def test_two_lineages_in_one_folder_are_told_apart_when_they_meet(tmp_path: Path) -> None:
    """Nodes of a lab share a disk: both sides of a cut have written into the one ledger."""
    left, right = [[record(step, name, name) for step in (3, 4)] for name in ("2-0", "2-1")]
    both = [left[0], right[0], right[1], left[1], record(5, "2-1", "2-1")]
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"), *both)
    assert not check_ledger(read_jsonl(path)).ok
    train_recorder.mark_abandoned(EventLog(path, 0), [GIVEN_UP])
    report = check_ledger(read_jsonl(path))
    assert report.ok
    assert (report.steps, report.abandoned) == (5, 2)


def test_steps_of_a_lineage_that_was_given_up_come_with_that_word(tmp_path: Path) -> None:
    """A machine was away while two others parted and met: its copy must not show a fork that is none."""
    left, right = [[record(step, name, name) for step in (3, 4)] for name in ("2-0", "2-1")]
    theirs = write(tmp_path / "theirs.jsonl", record(1, "1-0"), record(2, "1-0"), *left, *right)
    train_recorder.mark_abandoned(EventLog(theirs, 0), [GIVEN_UP])
    ours = write(tmp_path / "ours.jsonl", record(1, "1-0"), record(2, "1-0"))
    for _ in range(2):
        train_recorder.add_missing(EventLog(ours, 0), train_recorder.records_after(theirs, 2))
    assert check_ledger(read_jsonl(ours)) == check_ledger(read_jsonl(theirs))
    assert check_ledger(read_jsonl(ours)).ok
    assert len(read_jsonl(ours)) == len(read_jsonl(theirs))


def bring(world: World, folder: Path) -> list[tuple[int, str, str]]:
    """Rank 0's copy has ten steps and a lineage that was given up; rank 1 comes back with three."""
    path = folder / f"commits-{world.rank}.jsonl"
    whole = [record(step, "1-0") for step in range(1, 11)]
    end = {"abandoned": "2-0", "standing": "1-0", "after": 2}
    write(path, *(whole[:3] if world.rank else [*whole, record(4, "2-0", "2-0"), end]))
    state_transfer._RECORDS_PER_EXCHANGE = 4
    state_transfer.sync_ledgers(replace(world, keeps_files=True), world.rank == 1, path, [], lambda: EventLog(path, 0))
    return [train_recorder.record_key(each) for each in read_jsonl(path)]


def test_a_long_ledger_comes_in_pieces(tmp_path: Path) -> None:
    whole, brought = run_ranks(bring, 2, tmp_path, tmp_path)
    assert brought == whole


def test_in_a_shared_folder_a_machine_counts_only_its_own_steps(tmp_path: Path) -> None:
    """It would otherwise be told that the others' steps are abandoned when it comes back."""
    both = [record(step, "1-0") | {"members": [0, 1]} for step in (1, 2, 3)]
    alone = [record(step, "2-0", "2-0") | {"members": [0]} for step in range(4, 112)]
    path = write(tmp_path / "commits.jsonl", *both, *alone)
    assert train_recorder.last_step(path) == 111
    assert [train_recorder.last_step(path, rank) for rank in (0, 1, 2)] == [111, 3, 0]


def test_what_a_copy_lacks_is_named_once(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", *(record(step, "1-0") for step in (1, 2, 5, 9)))
    assert train_recorder.find_gaps(path, 10) == [(3, 4), (6, 8), (10, 10)]
    assert train_recorder.find_gaps(path, 5) == [(3, 4)]
    train_recorder.record_holes(EventLog(path, 0), [(3, 4)])
    assert train_recorder.find_gaps(path, 10) == [(6, 8), (10, 10)]
    assert train_recorder.find_gaps(tmp_path / "none", 2) == [(1, 2)]


def mend(world: World, folder: Path, sizes: tuple[int, int]) -> tuple[list[int], list[Any], list[str]]:
    """A run resumed from step 10; each machine's ledger was cut to so many lines."""
    path = folder / f"commits-{world.rank}.jsonl"
    write(path, *[record(step, "1-0") for step in range(1, 11)][: sizes[world.rank]])
    told: list[str] = []
    log = EventLog(path, 0)
    recorder = SimpleNamespace(warn=lambda error: told.append(error.seen), open_ledger=lambda: log)
    progress = SimpleNamespace(step=10)
    trainer: Any = SimpleNamespace(world=replace(world, keeps_files=True), progress=progress, recorder=recorder)
    state_transfer.fill_ledger_gaps(trainer, path)
    records = read_jsonl(path)
    holes = [each["hole"] for each in records if "hole" in each]
    return [each["step"] for each in records if "step" in each], holes, told


def test_a_ledger_that_was_cut_is_filled_in_from_another_machine(tmp_path: Path) -> None:
    whole: tuple[list[int], list[Any], list[str]] = (list(range(1, 11)), [], [])
    assert run_ranks(mend, 2, tmp_path, tmp_path, (10, 4)) == [whole, whole]
    assert run_ranks(mend, 2, tmp_path, tmp_path, (0, 10)) == [whole, whole]


def test_what_no_machine_has_is_a_hole_and_the_user_is_told(tmp_path: Path) -> None:
    for steps, holes, told in run_ranks(mend, 2, tmp_path, tmp_path, (4, 7)):
        assert (steps, holes) == (list(range(1, 8)), [[8, 10]])
        assert "lacks the lines of the steps 8 to 10, which are before the checkpoint of step 10" in told[0]
    report = check_ledger(read_jsonl(tmp_path / "commits-0.jsonl"))
    assert (report.ok, report.last, report.holes) == (False, 7, [(8, 10)])


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path) -> None:
    """Lines from another machine, the word of a lineage that was given up, and no hole for what only waits."""
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-0", "2-0"))
    log = EventLog(path, 0, lambda text: None)
    brought = [record(2, "1-0"), record(3, "2-1", "2-1")]
    with no_file_beyond(path.stat().st_size):
        for _ in range(2):
            train_recorder.mark_abandoned(log, [GIVEN_UP])
            train_recorder.add_missing(log, brought)
        assert len(read_jsonl(path)) == 2
        assert train_recorder.find_gaps(path, 3, log.kept_events()) == []
        assert [
            each["step"] for each in train_recorder.records_after(path, 1, log.kept_events()) if "step" in each
        ] == [
            3,
            2,
            3,
        ]
    assert log.flush() == 0
    log.close()
    assert len(read_jsonl(path)) == 5
    report = check_ledger(read_jsonl(path))
    assert report.ok
    assert (report.steps, report.abandoned) == (3, 1)


def make_recorder(run: Path, rank: int, keeps_files: bool) -> tuple[Recorder, World]:
    world = unjoined_world(Placement(rank, 2, rank, 2, launcher="shoal"), torch.device("cpu"))
    world = replace(world, keeps_files=keeps_files)
    return Recorder(RunFolder(run), world), world


@pytest.mark.parametrize("recovers", [False, True])
def test_a_rank_that_no_longer_keeps_the_ledger_writes_no_line_a_second_time(tmp_path: Path, recovers: bool) -> None:
    """The disk was full for 300 steps. The rank that keeps the ledger next remembers the last 256, or the run goes back
    to a checkpoint and does all of them again."""
    (tmp_path / "events").mkdir()
    path = write(tmp_path / "commits.jsonl")
    former, world = make_recorder(tmp_path, 1, keeps_files=True)
    steps = [record(step, "1-0") for step in range(1, 301)]
    with no_file_beyond(0):
        former.hold(steps)
        former.commit()
        assert read_jsonl(path) == []
        former.forget_committed() if recovers else None
        former.drop_unwritten() if recovers else None
        former.enter_world(replace(world, keeps_files=False), [])
    successor, _ = make_recorder(tmp_path, 0, keeps_files=True)
    successor.hold([record(step, "3-0", "3-0") for step in range(1, 301)] if recovers else steps[-256:])
    successor.commit()
    former.hold([record(301, "3-0")])
    former.commit()
    former.finish()
    former.close()
    successor.close()
    written = read_jsonl(path)
    assert sorted(each["step"] for each in written) == list(range(1, 301))
    assert {each["generation"] for each in written} == ({"3-0"} if recovers else {"1-0"})


def train_without_checkpoint(world: World, run: Path, steps: int) -> tuple[int, int]:
    """How many of the steps are in the ledger then, and how many wait to be committed."""
    world = replace(world, keeps_files=world.is_main)
    folder = RunFolder.open(run)
    recorder = Recorder(folder, world)
    trainer = build_trainer(load_config(folder.config), folder, world, recorder, StopRequest(), resume=False)
    for _ in range(steps):
        trainer.step()
    found = len(read_jsonl(folder.commits)), len(recorder.pending)
    recorder.close()
    return found


@pytest.mark.parametrize(("way", "every"), [("local", 2), ("local", 8), ("diloco", 20), ("streaming", 20), ("ddp", 1)])
def test_steps_are_committed_while_the_training_goes_on(tmp_path: Path, way: str, every: int) -> None:
    """In short rounds none was before the next checkpoint: all waited in memory, and could be lost with a rank."""
    rounds = (f"sync.every={every}",) if way != "ddp" else ()
    sets = (*TINY, "train.global_batch=6", "train.compile=off", "train.pin=off", f"sync.mode={way}", *rounds)
    run = create_run(build_config("grammar", None, sets=sets), tmp_path / "run", 2)
    (run.path / "events").mkdir(exist_ok=True)
    steps = 60
    (written, waiting), (_, elsewhere) = run_ranks(train_without_checkpoint, 2, tmp_path, run.path, steps)
    assert written >= steps - 2 * every - 16
    assert max(waiting, elsewhere) <= 2 * every + 16

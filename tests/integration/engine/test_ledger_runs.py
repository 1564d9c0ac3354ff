"""A machine's copy of the ledger when it rejoins or leaves an abandoned lineage.

Exercises engine.recorder, engine.recover.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.control.membership.types import Ballot
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import AbandonCommits
from shoal.engine import recorder as recorder_module
from shoal.engine import state_transfer
from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.recorder import Recorder
from shoal.engine.replica import Replica
from shoal.engine.saving import Saver
from shoal.events import EventLog
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder
from shoal.sync.world import World, unjoined_world
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.runs import file_size_limit
from tests.support.trainings import GptTraining, make_run

LEFT, RIGHT = Ballot(2, 0), Ballot(2, 1)
ABANDONED = AbandonCommits(lineage=LEFT, surviving=RIGHT, shared_step=2)


def record(step: int, generation: str, lineage: str = "1-0") -> dict[str, Any]:
    return {"step": step, "samples": [step - 1, step], "generation": generation, "lineage": lineage, "time": 1.0}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return path


def test_only_missing_records_are_added(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"))
    recorder_module.add_missing(EventLog(path, 0), [record(2, "1-0"), record(3, "4-0")])
    assert [(line["step"], line["generation"]) for line in read_jsonl(path)] == [(1, "1-0"), (2, "1-0"), (3, "4-0")]


def test_a_lineage_is_marked_abandoned_once(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-0", "2-0"), record(3, "2-1", "2-1"))
    for _ in range(2):
        recorder_module.mark_abandoned(EventLog(path, 0), [ABANDONED])
    [line] = [line for line in read_jsonl(path) if "abandoned" in line]
    assert (line["abandoned"], line["standing"], line["after"]) == ("2-0", "2-1", 2)


def test_a_copy_without_a_lineage_gets_no_mark_of_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-1", "2-1"))
    recorder_module.mark_abandoned(EventLog(path, 0), [ABANDONED])
    assert not [line for line in read_jsonl(path) if "abandoned" in line]


def test_a_new_machine_has_no_ledger_yet(tmp_path: Path) -> None:
    path = tmp_path / "commits.jsonl"
    assert recorder_module.last_step(path) == 0
    recorder_module.mark_abandoned(EventLog(path, 0), [ABANDONED])
    recorder_module.add_missing(EventLog(path, 0), [record(1, "1-0")])
    assert recorder_module.last_step(path) == 1


def test_only_missing_records_are_returned(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"))
    assert recorder_module.missing_records(path, [record(2, "1-0"), record(3, "1-0")]) == [record(3, "1-0")]
    assert recorder_module.missing_records(path, [record(2, "2-0")]) == [record(2, "2-0")]
    assert recorder_module.missing_records(tmp_path / "none", [record(1, "1-0")]) == [record(1, "1-0")]


def test_missing_records_of_a_long_ledger_are_found_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", *(record(step, "1-0") for step in range(1, 12_000)))
    assert path.stat().st_size > 1 << 20
    assert recorder_module.missing_records(path, [record(11_999, "1-0"), record(12_000, "1-0")]) == [
        record(12_000, "1-0")
    ]


def test_two_lineages_in_one_folder_are_separated_when_they_merge(tmp_path: Path) -> None:
    """Nodes of a lab share a disk: both sides of a partition have written to one ledger."""
    left, right = [[record(step, name, name) for step in (3, 4)] for name in ("2-0", "2-1")]
    both = [left[0], right[0], right[1], left[1], record(5, "2-1", "2-1")]
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(2, "1-0"), *both)
    assert not check_ledger(read_jsonl(path)).ok
    recorder_module.mark_abandoned(EventLog(path, 0), [ABANDONED])
    report = check_ledger(read_jsonl(path))
    assert report.ok
    assert (report.steps, report.abandoned) == (5, 2)


def test_copied_steps_of_an_abandoned_lineage_include_its_mark(tmp_path: Path) -> None:
    """A machine was away during a partition of two others: its copy must not show a fork."""
    left, right = [[record(step, name, name) for step in (3, 4)] for name in ("2-0", "2-1")]
    source = write(tmp_path / "source.jsonl", record(1, "1-0"), record(2, "1-0"), *left, *right)
    recorder_module.mark_abandoned(EventLog(source, 0), [ABANDONED])
    copy = write(tmp_path / "copy.jsonl", record(1, "1-0"), record(2, "1-0"))
    for _ in range(2):
        recorder_module.add_missing(EventLog(copy, 0), recorder_module.records_after(source, 2))
    assert check_ledger(read_jsonl(copy)) == check_ledger(read_jsonl(source))
    assert check_ledger(read_jsonl(copy)).ok
    assert len(read_jsonl(copy)) == len(read_jsonl(source))


def copy_ledger(world: World, folder: Path) -> list[tuple[int, str, str]]:
    """Synchronize rank 0's copy with ten steps and an abandoned lineage with rank 1's copy of three steps."""
    path = folder / f"commits-{world.rank}.jsonl"
    whole = [record(step, "1-0") for step in range(1, 11)]
    end = {"abandoned": "2-0", "standing": "1-0", "after": 2}
    write(path, *(whole[:3] if world.rank else [*whole, record(4, "2-0", "2-0"), end]))
    state_transfer._RECORDS_PER_EXCHANGE = 4
    state_transfer.sync_ledgers(replace(world, keeps_files=True), world.rank == 1, path, [], lambda: EventLog(path, 0))
    return [recorder_module.record_key(line) for line in read_jsonl(path)]


def test_a_long_ledger_is_copied_in_pieces(tmp_path: Path) -> None:
    whole, copied = run_ranks(copy_ledger, 2, tmp_path, tmp_path)
    assert copied == whole


def test_in_a_shared_folder_a_machine_counts_only_its_own_steps(tmp_path: Path) -> None:
    """Otherwise the other machines' steps would be reported as abandoned when it rejoins."""
    both = [record(step, "1-0") | {"members": [0, 1]} for step in (1, 2, 3)]
    alone = [record(step, "2-0", "2-0") | {"members": [0]} for step in range(4, 112)]
    path = write(tmp_path / "commits.jsonl", *both, *alone)
    assert recorder_module.last_step(path) == 111
    assert [recorder_module.last_step(path, rank) for rank in (0, 1, 2)] == [111, 3, 0]


def test_a_recorded_hole_is_not_a_gap(tmp_path: Path) -> None:
    path = write(tmp_path / "commits.jsonl", *(record(step, "1-0") for step in (1, 2, 5, 9)))
    assert recorder_module.find_gaps(path, 10) == [(3, 4), (6, 8), (10, 10)]
    assert recorder_module.find_gaps(path, 5) == [(3, 4)]
    recorder_module.record_holes(EventLog(path, 0), [(3, 4)])
    assert recorder_module.find_gaps(path, 10) == [(6, 8), (10, 10)]
    assert recorder_module.find_gaps(tmp_path / "none", 2) == [(1, 2)]


def fill_gaps(world: World, folder: Path, sizes: tuple[int, int]) -> tuple[list[int], list[Any], list[str]]:
    """Resume from step 10 with the ledger of rank r truncated to `sizes[r]` lines."""
    path = folder / f"commits-{world.rank}.jsonl"
    write(path, *[record(step, "1-0") for step in range(1, 11)][: sizes[world.rank]])
    warnings: list[str] = []
    log = EventLog(path, 0)
    recorder = SimpleNamespace(warn=lambda error: warnings.append(error.seen), open_ledger=lambda: log)
    progress = SimpleNamespace(step=10)
    replica: Any = SimpleNamespace(world=replace(world, keeps_files=True), progress=progress, recorder=recorder)
    state_transfer.fill_ledger_gaps(replica, path)
    records = read_jsonl(path)
    holes = [line["hole"] for line in records if "hole" in line]
    return [line["step"] for line in records if "step" in line], holes, warnings


def test_a_truncated_ledger_is_filled_from_another_machine(tmp_path: Path) -> None:
    whole: tuple[list[int], list[Any], list[str]] = (list(range(1, 11)), [], [])
    assert run_ranks(fill_gaps, 2, tmp_path, tmp_path, (10, 4)) == [whole, whole]
    assert run_ranks(fill_gaps, 2, tmp_path, tmp_path, (0, 10)) == [whole, whole]


def test_lines_that_no_machine_has_are_recorded_as_a_hole_with_a_warning(tmp_path: Path) -> None:
    for steps, holes, warnings in run_ranks(fill_gaps, 2, tmp_path, tmp_path, (4, 7)):
        assert (steps, holes) == (list(range(1, 8)), [[8, 10]])
        assert "lacks the lines of the steps 8 to 10, which are before the checkpoint of step 10" in warnings[0]
    report = check_ledger(read_jsonl(tmp_path / "commits-0.jsonl"))
    assert (report.ok, report.last, report.holes) == (False, 7, [(8, 10)])


def test_records_refused_by_a_full_disk_are_written_later(tmp_path: Path) -> None:
    """Check lines from another machine, the mark of an abandoned lineage, and that waiting lines are no hole."""
    path = write(tmp_path / "commits.jsonl", record(1, "1-0"), record(3, "2-0", "2-0"))
    log = EventLog(path, 0, lambda text: None)
    copied = [record(2, "1-0"), record(3, "2-1", "2-1")]
    with file_size_limit(path.stat().st_size):
        for _ in range(2):
            recorder_module.mark_abandoned(log, [ABANDONED])
            recorder_module.add_missing(log, copied)
        assert len(read_jsonl(path)) == 2
        assert recorder_module.find_gaps(path, 3, log.kept_events()) == []
        assert [
            line["step"] for line in recorder_module.records_after(path, 1, log.kept_events()) if "step" in line
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
def test_a_rank_that_stops_keeping_the_ledger_writes_no_line_twice(tmp_path: Path, recovers: bool) -> None:
    """Fill the disk for 300 steps. The next rank that keeps the ledger remembers the last 256, or the run returns to a
    checkpoint and repeats all of them."""
    (tmp_path / "events").mkdir()
    path = write(tmp_path / "commits.jsonl")
    former, world = make_recorder(tmp_path, 1, keeps_files=True)
    steps = [record(step, "1-0") for step in range(1, 301)]
    with file_size_limit(0):
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
    assert sorted(line["step"] for line in written) == list(range(1, 301))
    assert {line["generation"] for line in written} == ({"3-0"} if recovers else {"1-0"})


def test_the_ledger_and_the_events_are_on_disk_before_a_checkpoint_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a run resumes from the checkpoint and does not repeat the steps that its ledger must have."""
    (tmp_path / "events").mkdir()
    recorder, world = make_recorder(tmp_path, 0, keeps_files=True)
    recorder.hold([record(1, "1-0")])
    recorder.commit()
    recorder.event("step", step=1)
    operations: list[str] = []
    sync, mkdir = os.fsync, Path.mkdir

    def fsync(fd: int) -> None:
        operations.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
        sync(fd)

    def make_folder(path: Path, *args: Any, **options: Any) -> None:
        operations.append(path.name)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "mkdir", make_folder)
    replica: Any = SimpleNamespace(world=world, recorder=recorder)
    saver = Saver(replica, CheckpointFolder(tmp_path / "checkpoints", keep=1), 0)
    saver._begin(1, must=False)
    before = operations[: operations.index(".step-00000001.tmp")]
    assert {"commits.jsonl", ".", "events/rank-0.jsonl", "events"} <= set(before)
    assert saver._ledger is not None
    assert saver._ledger.size == (tmp_path / "commits.jsonl").stat().st_size > 0
    recorder.close()


def train_without_checkpoint(world: World, run: Path, steps: int) -> tuple[int, int]:
    """Return how many steps are in the ledger, and how many wait to be committed."""
    training = GptTraining(world, run)
    counts = 0, 0

    def count(replica: Replica) -> bool:
        nonlocal counts
        if replica.progress.step < steps:
            return False
        counts = len(read_jsonl(training.run.commits)), len(replica.recorder.pending)
        return True

    training.train(count)
    return counts


@pytest.mark.parametrize(("way", "every"), [("local", 2), ("local", 8), ("diloco", 20), ("streaming", 20), ("ddp", 1)])
def test_steps_are_committed_during_the_training(tmp_path: Path, way: str, every: int) -> None:
    """With short rounds steps once waited in memory until the next checkpoint and could be lost with a rank."""
    rounds = (f"sync.every={every}",) if way != "ddp" else ()
    sets = ("train.global_batch=6", "train.compile=off", "train.pin=off", f"sync.mode={way}", *rounds)
    run = make_run(tmp_path, 2, "train.checkpoint_every=1000", *sets)
    steps = 60
    (written, waiting), (_, elsewhere) = run_ranks(train_without_checkpoint, 2, tmp_path, run.path, steps)
    assert written >= steps - 2 * every - 16
    assert max(waiting, elsewhere) <= 2 * every + 16

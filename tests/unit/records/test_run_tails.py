"""The incremental reader of a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.events import Event
from shoal.records import run_tails
from shoal.records.run_tails import RunTails
from shoal.run_folder import RunFolder
from tests.support.run_samples import make_run, start, step


def append(path: Path, *events: Event) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def read(tails: RunTails) -> list[tuple[str, int, str]]:
    return [(file.kind, file.rank, event["event"]) for file, events in tails.poll() for event in events]


def test_each_event_is_read_once_also_of_files_that_appear_later(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0), step(1)])
    tails = RunTails(run, "rank", "agent", "supervisor")
    assert read(tails) == [("rank", 0, "start"), ("rank", 0, "step")]
    append(run.journal("node1"), {"event": "note", "rank": 0, "time": 1.0, "text": "x"})
    append(run.events(1), start(1))
    append(run.events(0), step(2))
    assert sorted(read(tails)) == [("agent", -1, "note"), ("rank", 0, "step"), ("rank", 1, "start")]
    assert read(tails) == []
    tails.restart()
    assert len(read(tails)) == 5


def test_only_the_kinds_that_were_asked_for_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0)])
    append(run.journal("node1"), {"event": "note", "rank": 0, "time": 1.0, "text": "x"})
    append(run.commits, {"step": 1})
    assert read(RunTails(run, "agent")) == [("agent", -1, "note")]
    assert [file.kind for file, _ in RunTails(run, "commits").poll()] == ["commits"]


def test_what_is_there_already_can_be_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0), step(1)])
    tails = RunTails(run, "rank")
    tails.skip_to_end()
    append(run.events(0), step(2))
    assert read(tails) == [("rank", 0, "step")]


def test_half_a_line_waits_and_damaged_lines_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0)])
    tails, line = RunTails(run, "rank"), json.dumps(step(1)).encode() + b"\n"
    with run.events(0).open("ab") as file:
        file.write(b'noise\n{"event":"note","rank":7,"text":"of another rank"}\n' + line[:20])
    assert read(tails) == [("rank", 0, "start")]
    assert (tails.unreadable, tails.unfinished) == (2, 1)
    with run.events(0).open("ab") as file:
        file.write(line[20:])
    assert read(tails) == [("rank", 0, "step")]
    assert (tails.unreadable, tails.unfinished) == (2, 0)


def test_a_long_run_is_read_in_turns_with_its_ranks_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tails, "_RANK_TURN_BYTES", 1000)
    monkeypatch.setattr(run_tails, "_TURN_S", 0.0)
    monkeypatch.setattr("shoal.events._BLOCK_BYTES", 500)
    run = make_run(tmp_path / "run", [step(number, rank) for rank in (0, 1) for number in range(1, 101)])
    tails, last = RunTails(run, "rank"), {0: -1, 1: -1}
    for _ in range(1000):
        for file, events in tails.poll_in_turns(last.__getitem__):
            last[file.rank] = max((event["step"] for event in events), default=last[file.rank])
        assert abs(last[0] - last[1]) <= 4
        if not tails.unread_bytes:
            break
        assert 0 < tails.loaded < 1
    assert (last, tails.loaded) == ({0: 100, 1: 100}, 1.0)


def test_an_empty_folder_has_nothing_to_read(tmp_path: Path) -> None:
    assert read(RunTails(RunFolder.create(tmp_path / "run"), "rank", "agent", "samples", "commits", "supervisor")) == []

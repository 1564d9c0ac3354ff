"""`shoal runs`: one damaged run is shown as such, and hides no other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.errors import DataError
from shoal.events import EventLog
from shoal.run_folder import RunFolder
from shoal.runs import manage
from shoal.runs.manage import StopResult, past_runs, stop_run


def make_run(folder: Path, **manifest: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "manifest.json").write_text(json.dumps({"status": "finished", **manifest}))
    return folder


@pytest.mark.parametrize("created", ["yesterday", 5, None, ["2026-11-18"]])
def test_a_wrong_value_in_one_manifest_breaks_no_list(created: object, tmp_path: Path) -> None:
    make_run(tmp_path / "a", created=created, steps="many", steps_planned=[])
    make_run(tmp_path / "b", created="2020-01-02T03:04:05+00:00", steps=7)
    runs = past_runs(tmp_path, [])
    assert [(run.run.name, run.step, run.state) for run in runs] == [("a", None, "finished"), ("b", 7, "finished")]
    assert runs[1].created == "2020-01-02T03:04:05+00:00"


@pytest.mark.parametrize(
    ("code", "status", "state"),
    [
        (1, None, "failed"),
        (0, None, "finished"),
        (130, None, "interrupted"),
        (2, "unfinished", "failed"),
        (0, "unfinished", "ended early"),
        (130, "unfinished", "interrupted"),
        (0, "finished", "finished"),
        (None, "unfinished", "unfinished"),
    ],
)
def test_a_run_without_ends_of_its_ranks_has_that_of_its_supervisor(
    code: int | None, status: str | None, state: str, tmp_path: Path
) -> None:
    path = make_run(tmp_path / "a", status=status)
    if status is None:
        (path / "manifest.json").unlink()
    log = EventLog(path / "supervisor.jsonl", 0)
    log.write("supervising", pid=1)
    if code is not None:
        log.write("ended", code=code)
    assert [run.state for run in past_runs(tmp_path, [])] == [state]


def test_a_run_that_had_to_be_killed_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(make_run(tmp_path / "a", status="unfinished"))
    EventLog(run.supervisor, 0).write("supervising", pid=1)
    monkeypatch.setattr(manage, "find_processes", lambda path: ["a hung rank"])
    monkeypatch.setattr(manage, "ask_to_stop", lambda processes: None)
    monkeypatch.setattr(manage, "_heads", lambda run: [])
    monkeypatch.setattr(manage, "wait_until_ended", lambda find, wait_s: False)
    monkeypatch.setattr(manage, "end_processes", lambda processes: None)
    assert stop_run(run, 0.0) is StopResult.ENDED
    assert [past.state for past in past_runs(tmp_path, [])] == ["interrupted"]


@pytest.mark.parametrize(
    "name", ["commits.jsonl", "manifest.json", "events/rank-0.jsonl", "checkpoints/step-1/state.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_a_run_with_a_pipe_or_a_device_in_place_of_a_file_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    """Reading it would wait forever, or never end."""
    path = make_run(tmp_path / "a") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError) as refused:
        RunFolder.find(tmp_path / "a")
    assert str(path) in str(refused.value)
    assert refused.value.fix.endswith(f"rm {path}")
    make_run(tmp_path / "b")
    assert [(run.run.name, run.state) for run in past_runs(tmp_path, [])] == [("b", "finished"), ("a", "damaged")]

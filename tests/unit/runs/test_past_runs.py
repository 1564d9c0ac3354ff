"""`shoal runs`: one damaged run is shown as such, and hides no other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.errors import DataError
from shoal.run_folder import RunFolder
from shoal.runs.manage import past_runs


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

"""`shoal runs`: past runs from their folders."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from shoal.cli.output import run_rows
from shoal.cli.run import misplaced_note
from shoal.cli.runs import print_script_end
from shoal.config.load import build_config, to_toml
from shoal.records.manifest import current_manifest
from shoal.run_folder import RunFolder
from tests.support.run_samples import make_session_run


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished runs and one that never wrote a manifest; no run of another test counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.runs.manage.find_processes", lambda run=None: [])
    monkeypatch.setattr("shoal.cli.runs.find_processes", lambda run=None: [])
    for name, created, loss in (("old", "2026-01-01T10:00:00+00:00", 3.5), ("new", "2026-02-01T10:00:00+00:00", 2.25)):
        write_run(
            name,
            created=created,
            status="finished",
            preset="grammar",
            on="local:2",
            steps=20,
            steps_planned=20,
            world_size=2,
            final_loss=loss,
            unit="tokens",
            tokens_per_sec={"2": 6200.4},
        )
    write_run("dead")
    return tmp_path / "runs"


def write_run(name: str, **manifest: Any) -> None:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(build_config("grammar", sets=["train.steps=20"])))
    if manifest:
        (folder / "manifest.json").write_text(json.dumps(manifest))


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert run(["runs", *words, "--json"], debug=False) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


@pytest.mark.usefixtures("folders")
def test_runs_are_listed_with_their_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs"], debug=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "loss", "speed", "on", "started"]
    assert all(line == line.rstrip() for line in lines)
    new = next(line for line in lines if "runs/new" in line)
    assert "2.250" in new
    assert "6,200 tokens/s" in new
    assert next(line for line in lines if "runs/dead" in line).split()[1] == "unfinished"
    assert [line.split()[0] for line in lines].index("runs/new") < [line.split()[0] for line in lines].index("runs/old")


@pytest.mark.usefixtures("folders")
def test_runs_are_filtered_by_text_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert [entry["run"] for entry in listed(capsys, "old")] == ["runs/old"]
    assert [entry["run"] for entry in listed(capsys, "--state", "unfinished")] == ["runs/dead"]
    assert listed(capsys, "--in", "elsewhere") == []
    assert run(["runs", "--state", "finishd"], debug=False) == 2
    assert "did you mean 'finished'?" in capsys.readouterr().err


def test_a_run_is_deleted_only_after_a_confirmation(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "--delete", "runs/old"], debug=False) == 2
    assert "there is no terminal to ask at" in capsys.readouterr().err

    class Answer(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Answer("n\n"))
    assert run(["runs", "--delete", "runs/old"], debug=False) == 0
    assert "kept runs/old" in capsys.readouterr().out
    assert (folders / "old").is_dir()
    monkeypatch.setattr(sys, "stdin", Answer("y\n"))
    assert run(["runs", "--delete", "runs/old"], debug=False) == 0
    assert "deleted runs/old (finished, 20 steps, " in capsys.readouterr().out
    assert not (folders / "old").exists()
    monkeypatch.setattr("shoal.cli.runs.find_processes", lambda run=None: ["a process"])
    assert run(["runs", "--delete", "runs/new", "--yes"], debug=False) == 2
    assert "runs/new is running" in capsys.readouterr().err
    assert (folders / "new").is_dir()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--on", "local:2"], "shoal run --on … train.py"),
        (["-m", "my.training", "--wire=int8", "--detach"], "also --wire=int8 and --detach; options"),
        (["train.py", "--epochs", "3", "--out", "x"], ""),
        (["-m", "--on"], ""),
    ],
)
def test_options_of_shoal_after_the_script_are_noted(words: list[str], expected: str) -> None:
    note = misplaced_note(words)
    assert expected in note
    assert bool(note) == bool(expected)


@pytest.mark.usefixtures("folders")
def test_a_killed_run_has_its_own_steps_and_not_those_of_an_older_manifest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("killed", status="unfinished", steps=12, steps_planned=20)
    newest = {"killed": (17, 1.25)}
    monkeypatch.setattr("shoal.runs.manage._last_step", lambda run: newest.get(run.path.name, (None, None)))
    entries = {entry["run"]: entry for entry in listed(capsys)}
    assert (entries["runs/killed"]["step"], entries["runs/new"]["step"]) == (17, 20)
    assert entries["runs/killed"]["loss"] == 1.25


def test_a_plain_script_ends_with_its_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", is_training=False)
    print_script_end(folder, detach=False)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"run folder: {folder.path}\n")


def test_rows_without_a_value_are_left_out(tmp_path: Path) -> None:
    manifest = current_manifest(make_session_run(tmp_path / "run"))
    assert {"loss", "speed"} <= dict(run_rows(manifest)).keys()
    empty = manifest.model_copy(update={"final_loss": None, "samples_per_sec": {}})
    assert not {"loss", "speed"} & dict(run_rows(empty)).keys()

"""Files of a run folder are replaced whole, and durably."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.run_folder import RunFolder, write_atomically


def test_a_file_is_on_disk_before_it_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, operations = tmp_path / "orders", []
    sync, replace = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        target = Path(f"/proc/self/fd/{fd}").readlink()
        operations.append("sync folder" if target == tmp_path else f"sync {target.read_text()}")
        sync(fd)

    def recorded_replace(source: Path, target: Path) -> Path:
        operations.append("replace")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    write_atomically(path, "new")
    assert operations == ["sync new", "replace", "sync folder"]
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_with_the_same_id_can_replace_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a lab share a disk and have process ids of their own."""
    path, replace = tmp_path / "config.toml", Path.replace

    def replace_after_the_other(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_atomically(path, "of the other")
        return source.replace(target)

    monkeypatch.setattr(Path, "replace", replace_after_the_other)
    write_atomically(path, "of this")
    assert path.read_text() == "of this"
    assert list(tmp_path.iterdir()) == [path]


def test_the_advice_of_a_rank_fits_the_run(tmp_path: Path) -> None:
    advice = "resume from the last checkpoint: shoal train --resume RUN. If the same samples fail again, lower the rate"
    run = RunFolder(tmp_path)
    assert run.name_in(advice).startswith("start it again, since it has no checkpoint yet. If the same samples")
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    assert f"shoal train --resume {tmp_path}." in run.name_in(advice)
    run.script.write_text("{}")
    assert f"shoal run --resume {tmp_path}." in run.name_in(advice)

"""Writers for `session.on_step`: what they write, and that their failures end no training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.engine.loggers import TensorBoard, WandB
from shoal.engine.step_callbacks import StepRecord
from shoal.errors import UsageError
from tests.unit.test_tensorboard import read_scalars


def make_record(step: int, run: Path = Path("runs/one"), **values: float) -> StepRecord:
    return StepRecord(step, 2.0 / step, 12, 0.5, None, 0.1, values, run)


def test_tensorboard_has_every_step_at_once(tmp_path: Path) -> None:
    write = shoal.loggers.TensorBoard(tmp_path / "board")
    assert isinstance(write, TensorBoard)
    for step in (1, 2):
        write(make_record(step, accuracy=0.25))
        [file] = (tmp_path / "board").iterdir()
        scalars = read_scalars(file)
        assert [at for at, _, _ in scalars["loss"]] == list(range(1, step + 1))
    assert sorted(scalars) == ["accuracy", "loss", "lr", "samples_per_s", "step_s"]
    assert scalars["samples_per_s"][0][2] == 24


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    write = TensorBoard(tmp_path / "file" / "board")
    for step in (1, 2):
        write(make_record(step))
    [line] = capsys.readouterr().err.splitlines()
    assert "end before step 1" in line
    assert "shoal export --format tensorboard" in line


class RecordingWandb:
    def __init__(self, fails_at: int = 0) -> None:
        self.settings: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self._fails_at = fails_at

    def init(self, **settings: Any) -> None:
        self.settings.append(settings)

    def log(self, data: dict[str, Any], *, step: int) -> None:
        if step == self._fails_at:
            raise ConnectionError("no network")
        self.rows.append((step, data))


def test_wandb_continues_the_run_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = RecordingWandb(fails_at=3)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write = WandB(project="shells")
    for step in (1, 2, 3, 4):
        write(make_record(step))
    assert wandb.settings == [{"name": "one", "id": "one", "resume": "allow", "project": "shells"}]
    assert [step for step, _ in wandb.rows] == [1, 2]
    assert wandb.rows[0][1]["loss"] == 2.0
    assert "wandb failed at step 3: ConnectionError: no network" in capsys.readouterr().err


def test_a_missing_wandb_is_known_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="wandb cannot be imported") as caught:
        WandB()
    assert caught.value.fix == "pip install 'shoal[wandb]'"

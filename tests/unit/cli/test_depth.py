"""`--depth`: the size of a model as one number, on every verb that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from shoal.errors import UsageError
from shoal.tools.bench import scaling


@pytest.mark.parametrize(
    "verb",
    ["train", "plan", "host", "probe", "bench scaling", "bench levers", "emit torchrun", "emit slurm", "emit k8s"],
)
def test_every_verb_with_a_model_takes_a_depth(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*verb.split(), "--depth", "0"], debug=False) == 2
    assert "--depth 0: a model has at least one layer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_depth_is_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(rows: Any, *_: object) -> None:
        raise UsageError(f"layers: {[row.config.model.layers for row in rows]}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaling, "measure_scaling", measure)
    run(["bench", "scaling", "--on", "local:1", "--on", "local:2", "--depth", "5"], debug=False)
    assert "layers: [5, 5]" in capsys.readouterr().err
    run(["bench", "scaling", "--depth", "2", "--set", "train.steps=9", "--json", "--csv"], debug=False)
    assert "--json does not go with --csv" in capsys.readouterr().err
    assert run(["emit", "torchrun", "--on", "local:2,device=cpu", "--depth", "2"], debug=False) == 0
    printed = capsys.readouterr().out
    assert "model.layers=2" in printed
    assert "run.devices=cpu/cpu" in printed

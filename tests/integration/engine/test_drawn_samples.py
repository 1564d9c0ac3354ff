"""Samples drawn with replacement: the same on any number of ranks and over a loss, and the verdict of `shoal verify`.

Exercises engine.sampling, engine.batches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.runs import ended_afterwards

SCRIPT = ROOT / "tests/support/scripts/drawn.py"


@pytest.mark.parametrize("way", ["weighted", "equal"])
def test_a_loss_changes_no_draw(way: str, tmp_path: Path) -> None:
    weights, losses = {}, {}
    for ranks in (1, 3):
        run, result = tmp_path / f"on-{ranks}", tmp_path / f"on-{ranks}.json"
        with ended_afterwards(run):
            done = shoal("run", "--on", f"local:{ranks}", "--out", run, SCRIPT, way, result)
        assert done.returncode == 0, done.stderr
        assert result.with_suffix(".killed").exists() == (ranks == 3)
        weights[ranks] = json.loads(result.read_text())
        records = read_jsonl(run / "commits.jsonl")
        assert [record["samples"] for record in records] == [[12 * step, 12 * step + 12] for step in range(12)]
        losses[ranks] = [record["loss"] for record in records if not record.get("partial")]
        verified = shoal("verify", run)
        assert verified.returncode == 0, verified.stdout
        assert "144 draws of samples with replacement, none skipped or done twice" in verified.stdout
    assert weights[3] == pytest.approx(weights[1], abs=1e-5)
    assert len(losses[3]) > 10

"""`shoal bench` on real ranks.

Exercises tools.bench.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.tools.bench.levers import CEILING, ONE_NODE
from tests.support.programs import TINY, set_flags, shoal


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_cluster_without_a_gpu_is_skipped_and_the_others_are_measured(tmp_path: Path) -> None:
    words = ("bench", "scaling", "--on", "local:1,device=cuda", "--on", "local:2", "--steps", "4")
    done = shoal(*words, "--out", tmp_path / "out", *set_flags(*TINY), timeout_s=240.0, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "skipped: local:1,device=cuda: rank 0 on local is to use a GPU, but torch" in done.stdout
    assert "Only a run on local:2 was measured" in done.stdout
    document = json.loads((tmp_path / "out" / "scaling.json").read_text())
    skipped, measured = document["rows"]
    assert (skipped["status"], skipped["tokens_per_s"]) == ("skipped", None)
    assert (measured["status"], measured["ranks"], measured["speedup"]) == ("measured", 2, 1.0)
    assert 0 < measured["allreduce_p50_ms"] <= measured["allreduce_p95_ms"]
    assert Path(document["picture"]).is_file()


@pytest.mark.exhaustive
def test_levers_are_measured_on_real_ranks(tmp_path: Path) -> None:
    words = ("bench", "levers", "--levers", "stock,diloco:3", "--steps", "6", "--json", "--out", tmp_path)
    result = shoal(*words, *set_flags(*TINY))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    rows = {row["lever"]: row for row in document["rows"]}
    assert list(rows) == [ONE_NODE, CEILING, "stock", "diloco:3"]
    assert [row["nodes"] for row in rows.values()] == [1, 2, 2, 2]
    assert rows["stock"]["of_stock"] == 1.0
    assert rows["diloco:3"]["theoretical_bytes_per_step"] == rows["stock"]["theoretical_bytes_per_step"] / 3
    assert rows[CEILING]["val_loss_at_equal_tokens"] is None
    assert 0 < rows["diloco:3"]["val_loss_at_equal_tokens"] < 10
    assert Path(document["picture"]).is_file()
    assert all(Path(run).is_dir() for run in document["runs"].values())

"""`shoal verify` and the report page for runs whose membership changed.

Exercises `shoal verify`, `shoal report`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.tools.report.page import write_report
from tests.integration.test_whole_runs import rendered_document
from tests.support.programs import shoal
from tests.unit.records.test_history import ABANDONED, parted_run, with_equal_states


def test_verify_counts_abandoned_steps_and_omits_old_states(tmp_path: Path) -> None:
    run = with_equal_states(parted_run(tmp_path / "run", ABANDONED), 0, 1)
    save_file({"w": np.ones(4, np.float32)}, run.state(4))
    done = shoal("verify", run.path)
    assert "identical: 2 replicas" in done.stdout
    assert "left out: the state that rank 4 wrote earlier; it took no part at the end" in done.stdout
    assert "complete: 60 steps, 1,440 samples" in done.stdout
    assert "6 steps abandoned, 4 generations in 3 lineages" in done.stdout


def test_verify_refuses_a_fork(tmp_path: Path) -> None:
    run = with_equal_states(parted_run(tmp_path / "run"), 0, 1)
    done = shoal("verify", run.path)
    assert done.returncode == 1
    assert "forked: the lineages 3-0 and 3-1 both trained steps 21 to 26" in done.stdout
    ledger = json.loads(shoal("verify", run.path, "--json").stdout)["ledger"]
    assert ledger["forked"] == [{"lineages": ["3-0", "3-1"], "first": 21, "last": 26}]
    assert (ledger["ok"], ledger["steps"]) == (False, 60)


@pytest.mark.long
def test_a_real_browser_renders_the_membership(tmp_path: Path) -> None:
    run = parted_run(tmp_path / "run", ABANDONED)
    first = run.events(0).read_text().replace('"here"', '"<b>here"')
    run.events(0).write_text(first)
    document = rendered_document(write_report(run), tmp_path / "profile")
    for label in ("lineage 3-1, abandoned", "rank 0 (&lt;b&gt;here)", "rank 1 (here)"):
        assert label in document

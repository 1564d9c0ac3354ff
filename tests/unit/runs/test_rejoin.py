"""`shoal join RUN`: which node of a run folder can come back, and when none can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.runs.join import rejoin


def make_folder(path: Path, *members: str) -> RunFolder:
    """Make the folder of a run whose last generation had these members; node1 and node2 were on this machine."""
    run = RunFolder(path)
    (path / "agents").mkdir(parents=True)
    (path / "job.json").write_text("{}")
    for node in ("node1", "node2"):
        run.orders(node).write_text("{}")
        generations = (["node1", "node2", "node9"], list(members))
        lines = [json.dumps({"event": "generation", "time": 1.0, "members": names}) for names in generations]
        run.journal(node).write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize("node", [None, "node2"])
def test_a_run_without_any_machine_left_is_resumed_instead(tmp_path: Path, node: str | None) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2")
    with pytest.raises(UsageError, match=r"no machine of .* is left that could let another one in") as refused:
        rejoin(run.path, node)
    assert refused.value.fix.endswith(f"shoal train --resume {run.path}")


def test_a_machine_elsewhere_may_still_train(tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2", "node3")
    with pytest.raises(UsageError, match=r"several nodes of .* could come back: node1, node2"):
        rejoin(run.path, None)

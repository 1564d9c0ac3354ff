"""What `shoal ps` calls a run, and what `--clean` ends.

Exercises runs.manage.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.processes import TEMPLATE, RunProcess
from shoal.run_folder import RunFolder
from shoal.runs.manage import describe, leftovers


@pytest.mark.parametrize(
    ("parts", "state"),
    [(["rank-0"], "left over"), ([TEMPLATE, TEMPLATE], "running"), ([TEMPLATE, "rank-0"], "left over")],
)
def test_a_template_alone_is_of_a_run_that_begins(parts: list[str], state: str, tmp_path: Path) -> None:
    """A command in another terminal has started it, and it ends with that command."""
    path = tmp_path / "run"
    processes = [RunProcess(0, path, part, "node1", "python", 0.0) for part in parts]
    if state == "left over":
        (RunFolder.create(path).token).touch()
    described = describe(path, processes)
    assert described.state == state
    assert bool(leftovers([described])) is (state == "left over")


def test_the_folder_of_a_probe_is_known_by_its_token(tmp_path: Path) -> None:
    """It has no configuration, and its agents have not written yet."""
    run = RunFolder.create(tmp_path / "run")
    assert run.is_removed()
    run.token.touch()
    assert not run.is_removed()

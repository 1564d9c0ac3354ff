"""A failed run prints one explanation at its end, and `shoal explain RUN` prints the same for its folder.

Exercises explain.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import RunFailed, ShoalError
from shoal.events import EventLog
from shoal.explain.explain import Findings, add_explanation, explain_run
from shoal.launch.failure import diagnose
from shoal.run_folder import RunFolder
from tests.integration.launch.test_failing_ranks import ending, fault
from tests.support.failures.bench import HERE, WRONG
from tests.support.programs import shoal, shoal_command


def stored(name: str) -> str:
    return str(HERE / f"{name}.log")


def explained_error(*names: str, why: str = "", fix: str = "") -> RunFailed:
    error = RunFailed("rank 1 on here ended with exit code 1", why=why, fix=fix)
    error.logs = tuple(stored(name) for name in names)
    add_explanation(error)
    return error


def test_cause_and_fix_are_put_before_the_original_ones() -> None:
    error = explained_error("ddp.unused-parameters", why="rank 0 failed too", fix="read its log: less rank-1.log")
    assert error.why.startswith("some parameters of the model were not used for the loss")
    assert error.why.endswith("(ddp.unused-parameters)\nrank 0 failed too")
    assert error.fix.startswith("DistributedDataParallel(model, find_unused_parameters=True)")
    assert error.fix.endswith("; read its log: less rank-1.log")


def test_the_cause_may_be_in_the_log_of_a_later_rank() -> None:
    assert "(ddp.different-models)" in explained_error("gloo.peer-closed", "ddp.different-models").why


@pytest.mark.parametrize("name", ["gloo.peer-closed", "unknown", "store.reverse-dns", "shoal.diverged", "no such log"])
def test_an_unknown_cause_adds_nothing(name: str) -> None:
    assert (explained_error(name, why="so it is", fix="look").why, explained_error(name, fix="look").fix) == (
        "so it is",
        "look",
    )


def test_a_guess_is_omitted_beside_an_unknown_error() -> None:
    assert explained_error("gloo.timeout").why
    assert explained_error("gloo.timeout", "unknown").why == ""


def logs_of(error: object) -> tuple[str, ...]:
    assert isinstance(error, RunFailed)
    return error.logs


def test_only_an_error_without_a_reason_is_explained_from_logs() -> None:
    ends = [ending(1, 1, order=0, log="one"), ending(0, 1, order=1, log="zero")]
    assert logs_of(diagnose(ends, {}, {})) == ("one", "zero")
    assert logs_of(diagnose(ends, {1: fault(1, "RunFailed")}, {})) == ("one", "zero")
    assert logs_of(diagnose(ends, {1: fault(1, "RunFailed", why="it diverged")}, {})) == ()
    assert logs_of(diagnose([ending(1, -9, order=0, log="one")], {}, {})) == ()
    assert logs_of(diagnose([ending(1, -9, order=0, log="one", lost="asleep")], {}, {})) == ()


def explained(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shoal("explain", run, "--json").stdout)
    return document


@pytest.mark.long
def test_a_script_that_fails_is_explained_at_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = shoal("run", "--out", run, WRONG, "unused_parameters")
    error = done.stderr[done.stderr.index("error: ") :]
    assert done.returncode == 1
    assert error.count("were not used for the loss") == 1
    assert "(ddp.unused-parameters)" in error
    assert "next: DistributedDataParallel(model, find_unused_parameters=True)" in error
    assert error.count("read its log: less ") == 1
    first = explained(run)["explanations"][0]
    assert first["id"] == "ddp.unused-parameters"
    # Both the error of the run and the log of the rank contain the exception.
    assert first["source"] in ("supervisor.jsonl", "logs/local/rank-0.log", "logs/local/rank-1.log")


def write_launch(run: RunFolder, error: ShoalError | None) -> None:
    """Write the events that a supervisor leaves of one launch."""
    log = EventLog(run.supervisor, 0)
    log.write("supervising", pid=1)
    log.write("ended", code=error.exit_code if error else 0, **(error.as_dict() if error else {}))
    log.close()


def test_a_run_folder_is_explained_by_its_newest_launch(tmp_path: Path) -> None:
    """The supervisor's error comes first; after a successful end old logs need no explanation."""
    run = RunFolder.create(tmp_path / "run")
    run.job.write_text("{}")
    run.log("node1", 0).parent.mkdir(parents=True)
    shutil.copy(stored("gloo.peer-closed"), run.log("node1", 0))
    shutil.copy(stored("ddp.different-models+count"), run.log("node1", 1))
    write_launch(run, RunFailed("node2 is gone, and rank 2 with it", why="asleep", fix="wake it"))
    explanations = explain_run(run).explanations
    assert [(item.id, item.evidence.source, item.evidence.line) for item in explanations] == [
        ("shoal.node-gone", "supervisor.jsonl", 2),
        ("ddp.different-models", "logs/node1/rank-1.log", 11),
        ("gloo.peer-closed", "logs/node1/rank-0.log", 11),
    ]
    assert explanations[0].fix == "wake it"
    write_launch(run, RunFailed("rank 1 on node1 ended with exit code 1"))
    assert [item.id for item in explain_run(run).explanations] == ["ddp.different-models", "gloo.peer-closed"]
    write_launch(run, None)
    assert explain_run(run) == Findings()
    assert shoal("explain", run.path).returncode == 1


def test_a_log_on_standard_input_is_explained() -> None:
    log = (HERE / "ssh.denied.log").read_bytes()
    for words in (["explain"], ["explain", "-"]):
        done = subprocess.run(shoal_command(*words), input=log, capture_output=True, timeout=30)
        assert done.returncode == 0
        assert done.stdout.startswith(b"cause: ssh.denied\n")
    assert subprocess.run(shoal_command("explain"), input=b"", capture_output=True, timeout=30).returncode == 1

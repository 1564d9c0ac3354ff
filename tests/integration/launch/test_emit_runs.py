"""The torchrun commands that `shoal emit` prints really train.

Exercises launch.emit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.lab import as_nodes
from shoal.config.load import build_config
from shoal.launch.emit import EmitJob, make_job, torchrun_commands
from shoal_lab.lab import Lab
from shoal_lab.processes import NodeProcess
from tests.support.labs import running_lab
from tests.support.programs import TINY, read_jsonl, shoal

RUN = Path("runs/lab")
STEPS = 6


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder that all nodes share, as the machines of a cluster must."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")


def make_lab_job(lab: Lab, slots: Sequence[int], *sets: str) -> EmitJob:
    nodes = [replace(node, slots=count) for node, count in zip(as_nodes(lab.state.spec), slots, strict=True)]
    settings = (*TINY, "train.global_batch=12", f"train.steps={STEPS}", "train.checkpoint_every=2", *sets)
    return make_job(build_config(sets=settings), nodes, RUN, sys.executable)


def run_on_nodes(lab: Lab, argv: Mapping[str, Sequence[str]], env: Mapping[str, Mapping[str, str]]) -> list[int]:
    """Return the exit codes when all processes have ended; kill them on an error."""
    processes = [
        lab.start(node, words, env.get(node, {}), Path(f"{node}.log").absolute()) for node, words in argv.items()
    ]
    try:
        return [process.wait(90) for process in processes]
    finally:
        end(processes)


def end(processes: Sequence[NodeProcess]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def read_logs() -> str:
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(Path().glob("*.log")))


def check_run(run: Path, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Check that all nodes trained, that one rank wrote the files, and that all replicas are identical."""
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    assert {node["name"]: node["ranks"] for node in manifest["nodes"]} == ranks
    assert {node["interface"] for node in manifest["nodes"]} == {"eth0"}
    assert (manifest["status"], manifest["launcher"]) == ("finished", "torchrun")
    assert manifest["wire_bytes_per_step"] > 0
    commits = read_jsonl(run / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, STEPS + 1))
    assert all(commit["loss"] > 0 for commit in commits)
    supervisors = [rank for rank in range(sum(ranks.values())) if "checkpoint" in kinds(run, rank)]
    assert supervisors == [0]
    assert shoal("verify", run).stdout.startswith(f"identical: {sum(ranks.values())} replicas")
    return manifest


def kinds(run: Path, rank: int) -> list[str]:
    return [event["event"] for event in read_jsonl(run / "events" / f"rank-{rank}.jsonl")]


@pytest.mark.long
def test_the_torchrun_commands_train_on_unequal_nodes() -> None:
    with running_lab(2) as lab:
        commands = torchrun_commands(make_lab_job(lab, (2, 1)), 29500)
        argv = {command.node: ["sh", "-c", command.command] for command in commands}
        assert run_on_nodes(lab, argv, {}) == [0, 0], read_logs()
    manifest = check_run(RUN, {"node1": 2, "node2": 1})
    assert [node["link_mbps"] for node in manifest["nodes"]] == [1000, 1000]

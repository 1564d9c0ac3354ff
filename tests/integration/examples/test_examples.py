"""The scripts in examples/: each trains two equal replicas to the end, and survives a lost rank and a lost node.

Exercises examples, engine.session.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.cluster import planned_nodes
from shoal.control.processes import find_supervisor
from tests.support.labs import need_lab
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal, shoal_command
from tests.support.runs import ended_afterwards, front, parts_of
from tests.support.waiting import wait_until

EXAMPLES = ROOT / "examples"
STAND_IN = ROOT / "tests" / "support" / "scripts" / "stand_ins" / "transformers.py"
SESSIONS = ("images", "finetune", "nanogpt", "notebook")


def prepare(name: str, folder: Path) -> Path:
    """Return a script to start: the example itself, the notebook's cells, or a copy beside a stand-in library."""
    if name == "notebook":
        script = folder / "notebook.py"
        script.write_text(notebook_code())
        return script
    script = EXAMPLES / f"{name}.py"
    if name == "finetune" and importlib.util.find_spec("transformers") is None:
        shutil.copy(STAND_IN, folder)
        return Path(shutil.copy(script, folder))
    return script


def notebook_code() -> str:
    document = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    return "\n".join("".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code")


def assert_verified(run: Path, steps: int) -> None:
    done = shoal("verify", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to the bit" in done.stdout
    assert f"complete: {steps} steps" in done.stdout
    assert "none skipped or used twice" in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    if path.is_file():
        assert len(path.read_text().splitlines()) < 80


def test_the_notebook_has_no_outputs() -> None:
    cells = [
        cell for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_classroom_script_ends_with_equal_replicas(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", EXAMPLES / "classroom.py", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / "out" / f"state-rank-{rank}.safetensors").read_bytes() for rank in range(2))
    assert first == second
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["ranks"] == 2
    assert len(manifest["loss"]) == manifest["steps"] == 20
    assert manifest["loss"][-1] < manifest["loss"][0]
    assert len(manifest["barrier_s"]) == 10
    assert len(manifest["hook_s"]) >= 10


@pytest.mark.long
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_ends_with_equal_replicas(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = shoal("run", "--on", "local:2", "--steps", "24", "--out", run, prepare(name, tmp_path), timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 24/24  loss ") == 1, "the session's progress, beside the script's own output"
    assert_verified(run, steps=24)


def test_the_cells_of_the_notebook_run_in_one_process(tmp_path: Path) -> None:
    script = prepare("notebook", tmp_path)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.7
    [run] = (tmp_path / "runs").iterdir()
    assert len(read_jsonl(run / "commits.jsonl")) == 40


def test_fine_tuning_without_transformers_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    script = shutil.copy(EXAMPLES / "finetune.py", tmp_path)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 2
    assert "pip install transformers" in done.stderr
    assert "Traceback" not in done.stderr


def last_commit(run: Path) -> dict[str, Any]:
    commits = run / "commits.jsonl"
    return read_jsonl(commits)[-1] if commits.exists() and commits.stat().st_size else {"step": 0, "members": []}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("images", "lab:2,slots=2", marks=pytest.mark.long),
        pytest.param("finetune", "lab:3", marks=pytest.mark.exhaustive),
        pytest.param("nanogpt", "lab:3", marks=pytest.mark.exhaustive),
        pytest.param("notebook", "lab:3", marks=pytest.mark.exhaustive),
    ],
)
def test_a_session_survives_a_killed_rank_and_a_killed_node(name: str, layout: str, tmp_path: Path) -> None:
    """Kill a rank, wait until it has joined again, then kill the last node: the others use all samples once."""
    need_lab()
    run, steps = tmp_path / "run", 200
    # The delay makes a step long enough for both faults to happen before the last one.
    on = f"{layout},link=1gbit,delay=25ms"
    nodes = planned_nodes(on)
    world, remaining = ([*range(sum(node.slots for node in part))] for part in (nodes, nodes[:-1]))
    words = ("run", "--on", on, "--steps", str(steps), "--out", run, prepare(name, tmp_path))
    with ended_afterwards(run), front(tmp_path, *words) as command:

        def reached(members: list[int], after_step: int) -> int:
            commit = last_commit(run)
            assert command.process.poll() is None, command.err
            return commit["step"] if commit["members"] == members and commit["step"] > after_step else 0

        step = wait_until(lambda: reached(world, 5), 240, lambda: command.err)
        os.kill(parts_of(run)["rank-1"].pid, signal.SIGKILL)
        step = wait_until(lambda: reached([rank for rank in world if rank != 1], step), 60, lambda: command.err)
        step = wait_until(lambda: reached(world, step), 120, lambda: command.err)
        supervisor = find_supervisor(run)
        assert supervisor is not None
        subprocess.run(
            shoal_command("lab", "kill", nodes[-1].name, "--name", f"run-{supervisor.pid}"),
            check=True,
            capture_output=True,
        )
        assert command.code(240) == 0, command.err
    assert last_commit(run)["members"] == remaining
    assert_verified(run, steps)

"""The loops of well-known projects in a session: the same losses as before, and a killed rank that comes back.

Exercises engine.session, engine.parts, engine.misuse, sync.gather, docs/your-model.md.
"""

from __future__ import annotations

import difflib
import inspect
import json
from pathlib import Path

import pytest
import torch

from shoal.engine.session import Session
from shoal.engine.step import _SEED_STRIDE, seed_generators
from shoal.sync.world import World
from tests.support import conversions
from tests.support.conversions import CONVERSIONS, STEPS, Conversion, RecordedStep, make
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session

# Added beside the loop's body: the import, the session, attach, `for step in session`, `with step`.
FRAME_LINES = 5
TABLE = ROOT / "docs/your-model.md"


def train(world: World, path: Path, name: str, settings: dict[str, object]) -> list[list[int]]:
    session: Session = open_session(world, path, settings)
    project, order = make(name), []
    session.attach(*project.attached)
    for step in session:
        samples: list[int] = []
        with step:
            project.converted(RecordedStep(step, samples))
        order.append(samples)
    return order


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_loop_has_the_losses_of_the_original(name: str, tmp_path: Path) -> None:
    options = CONVERSIONS[name].session
    settings = {"train": {"steps": STEPS, "global_batch": CONVERSIONS[name].batch, "pin": "off", **options}}
    path = make_folder(tmp_path / "run", settings)
    [order] = run_ranks(train, 1, tmp_path, path, name, settings)
    losses = [commit["loss"] for commit in read_jsonl(path / "commits.jsonl")]
    project, expected = make(name), []
    seed = seed_of(path)
    for number, samples in enumerate(order, 1):
        seed_generators(seed * _SEED_STRIDE + number)
        expected.append(float(project.plain(*(tensor[samples] for tensor in project.data)).detach()))
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3), "nothing was trained"


def seed_of(path: Path) -> int:
    seeds = {event["seed"] for event in read_jsonl(path / "events" / "rank-0.jsonl") if event["event"] == "start"}
    [seed] = seeds
    return int(seed)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_killed_rank_of_a_converted_loop_comes_back(name: str, tmp_path: Path) -> None:
    run, result = tmp_path / "run", tmp_path / "result.json"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:2", "--out", run, Path(conversions.__file__), name, result)
    assert done.returncode == 0, done.stderr
    assert result.with_suffix(".killed").exists(), "no rank was killed"
    assert json.loads(result.read_text()) == {"ranks": 2}, done.stderr
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout
    assert "identical: 2 replicas" in verified.stdout
    assert f"complete: {STEPS} steps" in verified.stdout


def changed_lines(project: type[Conversion]) -> int:
    """Count the lines of the loop that a session adds or changes."""
    plain, converted = (
        [line.strip() for line in inspect.getsource(function).splitlines()[1:]]
        for function in (project.plain, project.converted)
    )
    return FRAME_LINES + sum(line.startswith("+ ") for line in difflib.ndiff(plain, converted))


def test_the_page_has_every_project_with_its_lines() -> None:
    torch.manual_seed(0)
    text = TABLE.read_text(encoding="utf-8")
    for name, project in CONVERSIONS.items():
        assert f"| `{name}` | " in text
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| {changed_lines(project)} |"), f"{name}: {changed_lines(project)}"

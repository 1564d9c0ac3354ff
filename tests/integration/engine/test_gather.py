"""Losses that compare the samples of all ranks, and programs that exchange inside a step themselves.

Exercises sync.gather, engine.entry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.engine.session import Session
from shoal.errors import UsageError
from shoal.sync.world import World
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session

SCRIPT = ROOT / "tests/support/scripts/contrastive.py"
INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))


def settings(**run: Any) -> dict[str, Any]:
    return {"train": {"steps": 10, "global_batch": 12, "pin": "off"}, "run": run}


def compare_all(session: Session) -> nn.Module:
    """Train so that every sample is told from all others of the step, on whatever rank they are."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for step in session:
        with step:
            for inputs in step.batches(INPUTS):
                rows = F.normalize(model(inputs))
                everyone, own = step.gather(rows)
                assert torch.equal(everyone[own], rows)
                likeness = rows @ everyone.T - 10 * torch.eye(len(everyone))[own]
                step.backward(torch.logsumexp(likeness, dim=1).sum())
            step.update()
    return model


def train(world: World, path: Path, options: dict[str, Any]) -> list[float]:
    model = compare_all(open_session(world, path, settings(**options)))
    weights: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return weights


def train_alone(world: World, path: Path, options: dict[str, Any], sync: dict[str, Any]) -> list[float]:
    model = compare_all(open_session(world, path, {**settings(**options), "sync": sync}))
    weights: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return weights


def test_replicas_that_train_alone_weigh_rows_by_the_shares(tmp_path: Path) -> None:
    """After every step the replicas are averaged: with SGD that is the step of one process."""
    results = []
    for ranks, options, sync in ((1, {}, {}), (2, {"weights": "3/1"}, {"mode": "local", "every": 1})):
        path = make_folder(tmp_path / f"on-{ranks}", {**settings(**options), "sync": sync})
        results.append(run_ranks(train_alone, ranks, tmp_path, path, options, sync)[0])
    assert results[1] == pytest.approx(results[0], abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"weights": "3/1"}], ids=["equal shares", "unequal shares"])
def test_two_ranks_compare_all_samples_as_one_process_does(options: dict[str, Any], tmp_path: Path) -> None:
    results = {}
    for ranks in (1, 2):
        given = options if ranks == 2 else {}
        path = make_folder(tmp_path / f"on-{ranks}", settings(**given))
        results[ranks] = run_ranks(train, ranks, tmp_path, path, given)[0]
        results[-ranks] = [commit["loss"] for commit in read_jsonl(path / "commits.jsonl")]
    assert results[2] == pytest.approx(results[1], abs=1e-5)
    assert results[-2] == pytest.approx(results[-1], abs=1e-5)
    assert results[-1][-1] < results[-1][0]


def gather_wrongly(world: World, path: Path, rows: int, options: dict[str, Any]) -> str:
    session = open_session(world, path, {**settings(**options), "train": {**settings()["train"], "micro_batch": 3}})
    model = nn.Linear(8, 2)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in session:
            with step:
                for inputs in step.batches(INPUTS):
                    loss: Tensor = model(inputs).sum()
                    step.gather(torch.ones(rows, 2))
                    step.backward(loss)
    except UsageError as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (4, {}, "step.gather got 4 rows of 3 samples"),
        (3, {"weights": "3/1"}, "the ranks have different numbers of micro-batches: 3 and 1"),
    ],
)
def test_rows_that_belong_to_no_sample_are_refused(
    rows: int, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_folder(tmp_path / "run", settings(**options))
    for text in run_ranks(gather_wrongly, 2, tmp_path, path, rows, options):
        assert words in text


def survive(way: str, folder: Path) -> None:
    run, result = folder / "run", folder / "result.json"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:3", "--out", run, SCRIPT, way, result)
    assert done.returncode == 0, done.stderr
    assert result.with_suffix(".killed").exists(), "no rank was killed"
    assert result.exists()
    steps = {commit["step"] for commit in read_jsonl(run / "commits.jsonl")}
    assert steps == set(range(1, 17))
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize("way", ["own", "gather"])
def test_a_rank_that_dies_in_an_exchange_of_the_program_ends_no_run(way: str, tmp_path: Path) -> None:
    survive(way, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("time", range(10))
@pytest.mark.parametrize("way", ["own", "gather"])
def test_ten_deaths_in_an_exchange_of_the_program(way: str, time: int, tmp_path: Path) -> None:
    survive(way, tmp_path)


def test_the_result_is_that_of_one_process(tmp_path: Path) -> None:
    weights = []
    for on in ("local:1", "local:3"):
        result = tmp_path / f"{on}.json"
        result.with_suffix(".killed").touch()
        done = shoal("run", "--on", on, "--out", tmp_path / on, SCRIPT, "gather", result)
        assert done.returncode == 0, done.stderr
        weights.append(json.loads(result.read_text()))
    assert weights[0] == pytest.approx(weights[1], abs=1e-5)

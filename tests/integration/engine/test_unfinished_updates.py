"""A rank is lost while the others apply a step of a divided model: those that have not done it yet do it afterwards.

Every order is made by faults in the ranks themselves. What survivors have learned is compared with a run in which the
same rank is lost between two steps.

Exercises engine.sharded_recovery.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import GenerationBroken
from shoal.engine.replica_shards import ReplicaShards
from shoal.errors import PeerLost
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder
from shoal.sync.sharded.sync import ShardedSync, UpdatedWeights
from tests.support.programs import read_jsonl
from tests.support.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

STEPS, LOST_AT, BATCH, LENGTH = 10, 6, 12, 6
INPUTS = torch.linspace(-2, 2, 60 * LENGTH).sin().view(60, LENGTH)


class Averages:
    """An average of the weights after all steps: it must be of whole new weights, and miss none."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.count = model, 0
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def add(self) -> None:
        self.count += 1
        for value, parameter in zip(self.values, self._model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 1 / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        for value, loaded in zip(self.values, state_dict["values"], strict=True):
            value.copy_(loaded)


def train(folder: Path, settings: dict[str, Any], faults: dict[int, str], is_scaled: bool, lost_after: int) -> None:
    """Train; the ranks in `faults` take their peers for lost in step LOST_AT, after its norm or before its weights.

    Without faults all wait after the step `lost_after` until one of them is lost.
    """
    rank = Placement.from_env(os.environ).rank
    break_update(folder, rank, faults.get(rank, ""))
    session = shoal.Session(STEPS, BATCH, settings={"train.pin": "off", **settings})
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(LENGTH, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 1))
    optimizer, averages = torch.optim.AdamW(model.parameters(), lr=0.01), Averages(model)
    scalers = [GradScaler("cpu", init_scale=4.0, growth_interval=LOST_AT - 1)] if is_scaled else []
    session.attach(model, optimizer, StepLR(optimizer, step_size=2, gamma=0.9), averages, *scalers)
    for step in session:
        if step.number == lost_after + 1 and not faults and session.world_size == 3:
            wait_until((folder / "lost").exists, 60)
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().sum())
            step.update(clip=0.5, after=averages.add)
    numbers = [averages.count, optimizer.param_groups[0]["lr"], *(scaler.get_scale() for scaler in scalers)]
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    arrays |= {f"average {number}": value.numpy() for number, value in enumerate(averages.values)}
    np.savez(folder / f"end-{rank}.npz", numbers=np.array(numbers), **arrays)


def break_update(folder: Path, rank: int, fault: str) -> None:
    note_update, complete, gradient_norm = ReplicaShards.note_update, UpdatedWeights.complete, ShardedSync.gradient_norm
    seen: list[Any] = []
    applied: list[float] = []  # The norms of the steps that this rank has applied.

    def note(shards: ReplicaShards, norm: float, after: Callable[[], object] | None) -> None:
        note_update(shards, norm, after)
        applied.append(norm)
        if len(applied) == LOST_AT:
            (folder / f"applied-{rank}").touch()

    def norm(sync: ShardedSync, *arguments: Any) -> Tensor:
        result = gradient_norm(sync, *arguments)
        seen.append(result)
        if fault == "norm" and len(seen) == LOST_AT:
            raise PeerLost("a fault of the test")
        return result

    def arrive(weights: UpdatedWeights) -> None:
        if fault == "weights" and len(applied) == LOST_AT and not weights.is_complete:
            raise PeerLost("a fault of the test")
        complete(weights)

    ReplicaShards.note_update, ShardedSync.gradient_norm = note, norm  # type: ignore[method-assign,assignment]
    UpdatedWeights.complete = arrive  # type: ignore[method-assign,assignment]


def make_run(path: Path) -> RunFolder:
    run = RunFolder.create(path, is_training=False)
    for name in ("events", "checkpoints"):
        (path / name).mkdir(exist_ok=True)
    return run


def lose_rank_1(
    path: Path, settings: dict[str, Any], faults: dict[int, str], is_scaled: bool, lost_after: int = 0
) -> list[Any]:
    """Return what ranks 0 and 2 have in the end, when rank 1 was lost in step LOST_AT, or after the step given."""
    run = make_run(path)
    program: Callable[[], None] = partial(train, path, settings, faults, is_scaled, lost_after)
    with ScriptedAgent(path, 3, program=program) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        if faults:
            applied = [rank for rank in (0, 1, 2) if faults.get(rank) != "norm"]
            wait_until(
                lambda: all((path / f"applied-{rank}").exists() for rank in applied), 60, why=lambda: agent.log(0)
            )
            wait_until(lambda: all(agent.events(rank, "lost") for rank in faults), 60)
        else:
            agent.await_step(0, lost_after)
            agent.await_step(2, lost_after)
        agent.kill(1)
        (path / "lost").touch()
        agent.regroup((0, 2))
        agent.await_end((0, 2))
    return read_ends(run, (0, 2))


def read_ends(run: RunFolder, ranks: tuple[int, ...]) -> list[Any]:
    ledger = check_ledger(read_jsonl(run.commits))
    assert ledger.ok, ledger
    assert (ledger.steps, ledger.samples) == (STEPS, BATCH * STEPS)
    return [dict(np.load(run.path / f"end-{rank}.npz")) for rank in ranks]


ORDERS = {
    "the second waits for the norm": {2: "norm"},
    "the first waits for the norm": {0: "norm"},
    "both wait for the norm": {0: "norm", 2: "norm"},
    "the second waits for weights": {2: "weights"},
    "the first waits for weights": {0: "weights"},
}


@pytest.mark.parametrize("is_scaled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "settings",
    [{"sync.mode": "zero1"}, pytest.param({"sync.mode": "zero2", "sync.wire": "bf16"}, marks=pytest.mark.long)],
)
def test_survivors_finish_the_step_alike(settings: dict[str, Any], order: str, is_scaled: bool, tmp_path: Path) -> None:
    # A step that no survivor has applied is done again by two ranks, with other batches for BatchNorm.
    lost_after = LOST_AT - 1 if order == "both wait for the norm" else LOST_AT
    expected = lose_rank_1(tmp_path / "between", settings, {}, is_scaled, lost_after)
    results = lose_rank_1(tmp_path / "within", settings, ORDERS[order], is_scaled)
    is_lossy = "sync.wire" in settings
    for rank, first, wanted in zip(results, results[:1] * 2, expected, strict=True):
        assert rank.keys() == wanted.keys()
        for name, values in rank.items():
            np.testing.assert_array_equal(values, first[name], err_msg=name)
            rtol, atol = (0.05, 0.01) if is_lossy else (1e-5, 1e-6)
            np.testing.assert_allclose(values, wanted[name], rtol=rtol, atol=atol, err_msg=name)


def test_without_a_copy_survivors_begin_again_from_the_file_of_the_first_state(tmp_path: Path) -> None:
    """There is no checkpoint yet. Afterwards the training is that of two ranks from the first step on."""
    # BatchNorm sees as many samples at once whatever the number of ranks is.
    settings = {"sync.mode": "zero1", "sync.copies": 0, "train.micro_batch": 2}
    whole, lost = make_run(tmp_path / "whole"), make_run(tmp_path / "lost")
    with ScriptedAgent(whole.path, 2, program=partial(train, whole.path, settings, {}, True, 0)) as agent:
        agent.start(0, 1)
        agent.form((0, 1))
        agent.await_end((0, 1))
    with ScriptedAgent(lost.path, 3, program=partial(train, lost.path, settings, {}, True, LOST_AT)) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        agent.await_step(2, LOST_AT)
        agent.kill(1)
        (lost.path / "lost").touch()
        with patch.object(agent, "await_formed"):
            agent.regroup((0, 2))
        for rank in (0, 2):
            broken = agent.ranks[rank].receive(GenerationBroken, lambda message: message.generation == agent.generation)
            assert "the parts of rank 1" in broken.why
        agent.recover((0, 2))
        agent.await_end((0, 2))
    for actual, expected in zip(read_ends(lost, (0, 2)), read_ends(whole, (0, 1)), strict=True):
        for name, values in actual.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert not [path for path in lost.path.iterdir() if path.name.startswith("tmp")]

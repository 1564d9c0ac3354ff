"""A session trains a user's model as plain torch does in one process, and resumes it to the bit.

Exercises engine.session.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from shoal.config.load import to_toml, validate_session
from shoal.control.rank_env import Placement
from shoal.engine.environment import SessionStart
from shoal.engine.sampling import sample_indices
from shoal.engine.session import Session
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from tests.support.ranks import run_ranks

Arrays = dict[str, npt.NDArray[Any]]

SEED, COUNT, BATCH = 7, 50, 12
LENGTH, WORDS, PADDING = 5, 11, 0


@dataclass(frozen=True)
class Task:
    """A small training: how it counts the terms of its loss, and its settings."""

    counts: str = "samples"  # samples, tokens or texts: of one length, or of several lengths
    steps: int = 6
    train: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    with_momentum: bool = True
    clip: float = 1.0


def make_model(task: Task) -> nn.Module:
    torch.manual_seed(SEED)
    if task.counts == "samples":
        return nn.Sequential(nn.Linear(LENGTH, 8), nn.Tanh(), nn.Linear(8, 1))
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def make_data(task: Task) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    if task.counts == "samples":
        inputs = torch.randn(COUNT, LENGTH, generator=generator)
        return inputs, inputs.sum(1, keepdim=True).sin()
    rows = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
    if task.counts == "texts":
        lengths = torch.randint(1, LENGTH + 1, (COUNT, 1), generator=generator)
        rows = torch.where(torch.arange(LENGTH) < lengths, rows, PADDING)
    return rows, rows


def loss_sum(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int | None]:
    """Return the sum of all terms, and their number where they are not the samples."""
    if task.counts == "samples":
        return F.mse_loss(model(inputs), targets, reduction="sum"), None
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, int((targets != PADDING).sum())


def make_optimizer(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if task.with_momentum else 0.0)


def train_plainly(task: Task) -> Arrays:
    """Train on the same samples without shoal."""
    model = make_model(task)
    optimizer = make_optimizer(model, task)
    inputs, targets = make_data(task)
    batch = BATCH * task.sync.get("accumulate", 1)
    for step in range(task.steps):
        indices = torch.from_numpy(sample_indices(np.arange(step * batch, (step + 1) * batch), COUNT, SEED))
        loss, terms = loss_sum(model, task, inputs[indices], targets[indices])
        optimizer.zero_grad()
        (loss / (terms or batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
    return arrays(model)


def arrays(model: nn.Module) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def make_folder(folder: Path, task: Task) -> Path:
    settings = {
        "train": {"steps": task.steps, "global_batch": BATCH, "seed": SEED, "pin": "off", **task.train},
        "sync": {"inside": "gloo", **task.sync},
        "run": dict(task.run),
    }
    run = RunFolder.create(folder / "run", is_training=False)
    run.config.write_text(to_toml(validate_session(settings)))
    return run.path


def make_session(world: World, path: Path, task: Task, resume: bool = False) -> Session:
    run = RunFolder(path)
    config = validate_session(tomllib.loads(run.config.read_text()))
    placement = Placement(world.rank, world.size, world.rank, world.size, launcher="shoal")
    return Session.of(SessionStart(config, run, placement, resume, world=replace(world, keeps_files=world.is_main)))


def train(world: World, path: Path, task: Task) -> Arrays:
    session = make_session(world, path, task)
    model, data = make_model(task), make_data(task)
    session.attach(model, make_optimizer(model, task))
    for step in session:
        with step:
            for inputs, targets in step.batches(data):
                loss, terms = loss_sum(model, task, inputs, targets)
                step.backward(loss, terms)
            step.update(clip=task.clip)
    return arrays(model)


def check_like_plain(task: Task, ranks: int, folder: Path) -> None:
    expected = train_plainly(task)
    results = run_ranks(train, ranks, folder, make_folder(folder, task), task)
    for result in results:
        assert result.keys() == expected.keys()
        for name, values in result.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
            assert values.tobytes() == results[0][name].tobytes(), f"{name} differs between ranks"


TASKS: dict[str, tuple[int, Task]] = {
    "one rank": (1, Task()),
    "two ranks": (2, Task()),
    "shared memory": (2, Task(sync={"inside": "auto"})),
    "three ranks": (3, Task()),
    "micro-batches": (2, Task(train={"micro_batch": 2})),
    "accumulate": (2, Task(sync={"accumulate": 3})),
    "unequal shares": (2, Task(run={"weights": "2/1"}, train={"micro_batch": 2})),
    "tokens": (2, Task("tokens")),
    "tokens in micro-batches": (2, Task("tokens", train={"micro_batch": 2})),
    "tokens in unequal shares": (2, Task("tokens", run={"weights": "2/1"}, train={"micro_batch": 2})),
    "tokens of one rank": (1, Task("tokens", train={"micro_batch": 3})),
    "texts": (2, Task("texts", train={"count_varies": True})),
    "texts in micro-batches": (3, Task("texts", train={"count_varies": True, "micro_batch": 1})),
    "texts of one rank": (1, Task("texts", train={"count_varies": True, "micro_batch": 3})),
}


@pytest.mark.parametrize("name", TASKS)
def test_ranks_train_what_one_process_does(name: str, tmp_path: Path) -> None:
    ranks, task = TASKS[name]
    check_like_plain(task, ranks, tmp_path)


@pytest.mark.parametrize("counts", ["samples", "tokens"])
def test_averages_after_every_step_are_the_steps_of_one_process(counts: str, tmp_path: Path) -> None:
    """Without momentum and clipping, the mean of the ranks' parameters is that of one step on all samples."""
    task = Task(counts, with_momentum=False, clip=1e6, sync={"mode": "local", "every": 1}, train={"micro_batch": 3})
    check_like_plain(task, 2, tmp_path)


def count_too_many(world: World, path: Path, task: Task) -> str:
    session = make_session(world, path, task)
    model, data = make_model(task), make_data(task)
    session.attach(model, make_optimizer(model, task))
    try:
        for step in session:
            with step:
                for inputs, targets in step.batches(data):
                    loss, terms = loss_sum(model, task, inputs, targets)
                    step.backward(loss, (terms or 0) + step.number // 2)
                step.update()
    except UsageError as error:
        return error.render()
    return ""


def test_counts_that_vary_later_are_refused_with_the_setting(tmp_path: Path) -> None:
    task = Task("tokens")
    for error in run_ranks(count_too_many, 2, tmp_path, make_folder(tmp_path, task), task):
        assert error.startswith("error: step 2: 6 samples have 31 terms, and the first ones had 5 each\n")
        assert "count_varies=True" in error


# Resuming

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "int8": {"wire": "int8"},
    "powersgd": {"wire": "powersgd:2"},
    "local": {"mode": "local", "every": 4},
    "diloco": {"mode": "diloco", "every": 4},
    "diloco int8": {"mode": "diloco", "every": 4, "wire": "int8"},
    "streaming": {"mode": "streaming", "every": 4, "fragments": 2, "overlap": 1},
}
# Inside a round of the outer modes.
SAVED = 10


class Averages:
    """An object of the user's own with a state: a mean of the weights over all steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.count = 0

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


def train_with_everything(
    world: World, path: Path, task: Task, resume: bool, undo_after: int | None = None
) -> dict[str, Any]:
    """Train a model with buffers, dropout, AdamW, a schedule and an object of the user's own.

    With `undo_after` the training ends after that step, and its unfinished round is undone, as for a lost peer.
    """
    session = make_session(world, path, task, resume)
    norm_and_dropout = (nn.BatchNorm1d(8), nn.Dropout(0.1))
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(LENGTH, 8), *norm_and_dropout, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, averages = StepLR(optimizer, step_size=3, gamma=0.5), Averages(model)
    session.attach(model, optimizer, schedule, averages)
    data, round_start = make_data(task), None
    states: dict[int, Any] = {}

    def describe() -> tuple[Any, ...]:
        values = [value.numpy().tobytes() for value in averages.values]
        return optimizer.param_groups[0]["lr"], schedule.state_dict(), averages.count, values

    for step in session:
        states[step.number - 1] = describe()
        if step.number == SAVED + 1:
            round_start = (kept := session.replica.round_start.schedule) and kept.digest()
        if step.number - 1 == undo_after:
            undone_to = session.replica.roll_back()
            tasks_done = session.replica.periodic.done_step
            return {
                "step": undone_to,
                "tasks done": tasks_done,
                "undone": describe(),
                "expected": states[undone_to],
            }
        with step:
            for inputs, targets in step.batches(data):
                step.backward(loss_sum(model, task, inputs, targets)[0])
            step.update(after=averages.add)
    return {
        "began": next(iter(states)) + 1,
        "first": states[next(iter(states))][:3],
        "round start": round_start,
        "model": {name: tensor.tobytes() for name, tensor in arrays(model).items()},
        "averages": (averages.count, [value.numpy().tobytes() for value in averages.values]),
        "lr": optimizer.param_groups[0]["lr"],
        "digest": session.replica.state.digest(),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_training_has_the_same_bits(way: str, tmp_path: Path) -> None:
    task = Task(steps=2 * SAVED, train={"checkpoint_every": SAVED}, sync=WAYS[way])
    path = make_folder(tmp_path, task)
    whole = run_ranks(train_with_everything, 2, tmp_path, path, task, False)
    shutil.rmtree(path / "checkpoints" / f"step-{2 * SAVED:08d}")
    resumed = run_ranks(train_with_everything, 2, tmp_path, path, task, True)
    assert [rank["began"] for rank in whole + resumed] == [1, 1, SAVED + 1, SAVED + 1]
    for before, after in zip(whole, resumed, strict=True):
        assert after | {"began": 0, "first": 0} == before | {"began": 0, "first": 0}
    assert whole[0]["model"] == whole[1]["model"]
    assert whole[0]["lr"] == pytest.approx(0.01 * 0.5 ** (2 * SAVED // 3))


@pytest.mark.parametrize("mode", ["local", "diloco"])
def test_an_undone_round_takes_back_rates_and_other_objects(mode: str, tmp_path: Path) -> None:
    task = Task(steps=2 * SAVED, sync=WAYS[mode])
    [undone, _] = run_ranks(train_with_everything, 2, tmp_path, make_folder(tmp_path, task), task, False, SAVED)
    assert (undone["step"], undone["tasks done"]) == (8, 7), "the tasks of step 8 may have changed what is undone"
    assert undone["undone"] == undone["expected"]


def test_a_world_of_another_size_resumes_the_rates_of_the_common_step(tmp_path: Path) -> None:
    task = Task(steps=2 * SAVED, train={"checkpoint_every": SAVED}, sync=WAYS["diloco"])
    path = make_folder(tmp_path, task)
    run_ranks(train_with_everything, 2, tmp_path, path, task, False)
    shutil.rmtree(path / "checkpoints" / f"step-{2 * SAVED:08d}")
    [resumed] = run_ranks(train_with_everything, 1, tmp_path, path, task, True)
    rate, schedule, count = resumed["first"]
    assert (resumed["began"], count, schedule["last_epoch"], rate) == (9, 8, 8, pytest.approx(0.01 * 0.5**2))

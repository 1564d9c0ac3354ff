"""Sessions that divide moments and gradients train what one process does, whatever the program does with its weights.

Exercises engine.sharded_state, engine.sharding, sync.sharded.sync, sync.sharded.pending.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from shoal.engine.sampling import sample_indices
from shoal.engine.session import Session
from shoal.errors import UsageError
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.sessions import make_folder, open_session

Arrays = dict[str, npt.NDArray[Any]]
SEED, COUNT, STEPS = 7, 60, 6
LENGTH, WORDS, PADDING = 5, 11, 0


def small() -> nn.Module:
    """Buckets of a bias of 1, of less than a block, and of several blocks."""
    return nn.Sequential(nn.Linear(LENGTH, 60), nn.Tanh(), nn.Linear(60, 20), nn.Tanh(), nn.Linear(20, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        last: Tensor = self.head(self.lstm(inputs[:, :, None])[0][:, -1])
        return last


class Scaled(nn.Module):
    """Parameters without dimensions, of one number, frozen, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(LENGTH), requires_grad=False)
        self.first = nn.Linear(LENGTH, LENGTH)
        self.second = nn.Linear(LENGTH, LENGTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(LENGTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs * self.frozen).tanh() * self.scale)
        output: Tensor = self.head(hidden) + self.shift
        return output


class Branches(nn.Module):
    """Uses one branch where an input is positive, and no branch in `never`; what is last is used first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(LENGTH, 20), nn.Linear(20, 1)
        self.other, self.never = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, is_chosen = self.first(inputs).tanh(), inputs[:, 0] > 0.8
        output: Tensor = self.branch(hidden)
        if is_chosen.any():
            output = output + torch.where(is_chosen[:, None], self.other(hidden), 0.0)
        return output


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 24), nn.Linear(24, WORDS))


def convolutions() -> nn.Module:
    """Weights whose memory is not in the order of their dimensions."""
    model: Any = nn.Sequential(
        nn.Unflatten(1, (1, 1, LENGTH)), nn.Conv2d(1, 6, (1, 3)), nn.Tanh(), nn.Conv2d(6, 6, (1, 2)), nn.Flatten(),
        nn.Linear(12, 1),
    )  # fmt: skip
    last: nn.Module = model.to(memory_format=torch.channels_last)
    return last


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    first, *others = list(model.parameters())
    return [torch.optim.AdamW(others, lr=0.01), torch.optim.SGD([first], lr=0.1, momentum=0.9)]


def groups(model: nn.Module) -> list[Optimizer]:
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    return [torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others, "lr": 0.02}], lr=0.01)]


def of_torch(name: str, **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [getattr(torch.optim, name)(model.parameters(), **options)]


@dataclass(frozen=True)
class Case:
    make_model: Callable[[], nn.Module] = small
    make_optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    clip: float | None = None
    is_scheduled: bool = False
    batch: int = 12
    train: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 1e-4
    # Texts of several lengths: the loss has as many terms as they have words.
    is_text: bool = False

    @property
    def step_batch(self) -> int:
        accumulate: int = self.sync.get("accumulate", 1)
        return self.batch * accumulate


CASES = {
    "adamw": Case(),
    "clipped": Case(clip=0.1),
    "momentum": Case(make_optimizers=of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True)),
    "adagrad": Case(make_optimizers=of_torch("Adagrad", lr=0.05, initial_accumulator_value=0.1)),
    "rmsprop": Case(make_optimizers=of_torch("RMSprop", lr=0.005, momentum=0.5, centered=True)),
    "nadam": Case(make_optimizers=of_torch("NAdam", lr=0.01)),
    "asgd": Case(make_optimizers=of_torch("ASGD", lr=0.05)),
    "rprop": Case(make_optimizers=of_torch("Rprop", lr=0.005)),
    "fused": Case(make_optimizers=of_torch("AdamW", lr=0.01, fused=True)),
    "one by one": Case(make_optimizers=of_torch("AdamW", lr=0.01, foreach=False)),
    "two optimizers": Case(make_optimizers=two_optimizers, clip=1.0),
    "groups and a schedule": Case(make_optimizers=groups, is_scheduled=True),
    "micro-batches": Case(train={"micro_batch": 2}, clip=0.5),
    "accumulate": Case(sync={"accumulate": 3}, clip=0.5),
    "unequal shares": Case(run={"weights": "2/1"}, train={"micro_batch": 2}),
    "shares of three": Case(run={"weights": "3/2/1"}, train={"micro_batch": 1}),
    "a batch that does not divide": Case(batch=11, train={"micro_batch": 1}),
    "unused": Case(make_model=Branches, train={"unused_parameters": True, "micro_batch": 2}),
    "unused with momentum": Case(
        make_model=Branches,
        make_optimizers=of_torch("SGD", lr=0.1, momentum=0.9, weight_decay=0.1),
        train={"unused_parameters": True},
    ),
    "recurrent": Case(make_model=Recurrent, clip=0.5),
    "scalars, ties and frozen": Case(make_model=Scaled),
    "scalars with NAdam": Case(make_model=Scaled, make_optimizers=of_torch("NAdam", lr=0.01)),
    "double": Case(make_model=lambda: small().double(), rtol=1e-7),
    "half": Case(make_model=lambda: small().bfloat16(), make_optimizers=of_torch("SGD", lr=0.05), rtol=0.1),
    "channels last": Case(make_model=convolutions),
    "texts": Case(make_model=words, is_text=True, train={"count_varies": True}),
    "texts in micro-batches": Case(make_model=words, is_text=True, train={"count_varies": True, "micro_batch": 2}),
    "bf16": Case(sync={"wire": "bf16"}, make_optimizers=of_torch("SGD", lr=0.05), rtol=0.03),
    "small buckets": Case(sync={"bucket_mb": 0.0005}, clip=0.5, train={"micro_batch": 2}),
}
# Those that need a certain number of ranks.
RANKS = {"unequal shares": (2,), "shares of three": (3,), "a batch that does not divide": (3,)}


def make_case_model(case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    return case.make_model()


def make_data(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    if case.is_text:
        rows = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (COUNT, 1), generator=generator)
        rows = torch.where(torch.arange(LENGTH) < lengths, rows, PADDING)
        return rows, rows
    inputs = torch.randn(COUNT, LENGTH, generator=generator)
    inputs = inputs.to(next(make_case_model(case).parameters()).dtype)
    return inputs, inputs.sum(1, keepdim=True).sin()


def loss_sum(model: Callable[..., Tensor], case: Case, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int | None]:
    if not case.is_text:
        return F.mse_loss(model(inputs), targets, reduction="sum"), None
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, int((targets != PADDING).sum())


def train_plainly(case: Case) -> tuple[Arrays, list[float]]:
    model, losses = make_case_model(case), []
    optimizers, (inputs, targets) = case.make_optimizers(model), make_data(case)
    scheduler = StepLR(optimizers[0], step_size=2, gamma=0.5) if case.is_scheduled else None
    for step in range(STEPS):
        positions = np.arange(step * case.step_batch, (step + 1) * case.step_batch)
        indices = torch.from_numpy(sample_indices(positions, COUNT, SEED))
        loss, terms = loss_sum(model, case, inputs[indices], targets[indices])
        loss = loss / (terms or case.step_batch)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for optimizer in optimizers:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return arrays(model), losses


def arrays(model: nn.Module) -> Arrays:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in model.state_dict().items()}


def settings_of(case: Case, mode: str) -> dict[str, Any]:
    inside = {"inside": "gloo"} if mode == "ddp" else {}
    return {
        "train": {"steps": STEPS, "global_batch": case.batch, "seed": SEED, "pin": "off", **case.train},
        "sync": {"mode": mode, **inside, **case.sync},
        "run": dict(case.run),
    }


def attach(session: Session, case: Case, model: nn.Module) -> None:
    optimizers = case.make_optimizers(model)
    schedulers = [StepLR(optimizers[0], step_size=2, gamma=0.5)] if case.is_scheduled else []
    session.attach(model, *optimizers, *schedulers)


def train_case(world: World, path: Path, name: str, mode: str) -> Arrays:
    case = CASES[name]
    session, model = open_session(world, path, settings_of(case, mode)), make_case_model(case)
    attach(session, case, model)
    data = make_data(case)
    for step in session:
        with step:
            for inputs, targets in step.batches(data):
                step.backward(*loss_sum(model, case, inputs, targets))
            step.update(clip=case.clip)
    return arrays(model)


def train(path: Path, ranks: int, name: str, mode: str) -> tuple[list[Arrays], list[float]]:
    """Return the weights of all ranks, which must have the same bits, and the losses."""
    make_folder(path, settings_of(CASES[name], mode))
    weights = run_ranks(train_case, ranks, path.parent, path, name, mode)
    for own in weights[1:]:
        check_close(own, weights[0], rtol=0, atol=0)
    return weights, [commit["loss"] for commit in read_jsonl(path / "commits.jsonl")]


def check_close(actual: Arrays, expected: Arrays, rtol: float, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        np.testing.assert_allclose(values, expected[name], rtol=rtol, atol=atol, err_msg=name)


# Two methods with two ranks are quick enough for every change; the others with some of the cases.
QUICK = {("zero1", 2), ("zero3", 2)}
LONG = ("adamw", "clipped", "two optimizers", "recurrent", "micro-batches", "accumulate")


def _marks(name: str, mode: str, ranks: int) -> list[pytest.MarkDecorator]:
    if (mode, ranks) in QUICK:
        return []
    return [pytest.mark.long if name in LONG else pytest.mark.exhaustive]


MATRIX = [
    pytest.param(name, mode, ranks, marks=_marks(name, mode, ranks))
    for name in CASES
    for mode in ("zero1", "zero2", "zero3")
    for ranks in RANKS.get(name, (2, 3))
]


@pytest.mark.parametrize(("name", "mode", "ranks"), MATRIX)
def test_ranks_train_what_one_process_does(name: str, mode: str, ranks: int, tmp_path: Path) -> None:
    weights, losses = train(tmp_path / "run", ranks, name, mode)
    expected, expected_losses = train_plainly(CASES[name])
    rtol = CASES[name].rtol
    np.testing.assert_allclose(losses, expected_losses, rtol=rtol, atol=rtol / 100)
    check_close(weights[0], expected, rtol, atol=rtol / 100)


@pytest.mark.parametrize("name", ["adamw", "momentum", "recurrent", "micro-batches", "scalars, ties and frozen"])
def test_two_equal_ranks_have_the_bits_of_ddp(name: str, tmp_path: Path) -> None:
    """Of two numbers there is one sum. Without clipping: the norm is summed in another order."""
    results = {}
    for mode in ("ddp", "zero1", "zero2"):
        unclipped = replace(CASES[name], clip=None)
        path = make_folder(tmp_path / mode, settings_of(unclipped, mode))
        weights = run_ranks(train_unclipped, 2, tmp_path, path, name, mode)
        results[mode] = weights[0], [commit["loss"] for commit in read_jsonl(path / "commits.jsonl")]
    assert results["zero1"][1] == results["ddp"][1]
    check_close(results["zero1"][0], results["ddp"][0], rtol=0, atol=0)
    if name != "micro-batches":
        assert results["zero2"][1] == results["ddp"][1]


def train_unclipped(world: World, path: Path, name: str, mode: str) -> Arrays:
    CASES[name] = replace(CASES[name], clip=None)
    return train_case(world, path, name, mode)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before BatchNorm has no gradient but for rounding.
        first = nn.Linear(LENGTH, 30, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


def train_like_ddp(world: World, path: Path, mode: str, scale: float) -> tuple[Arrays, float]:
    """Train a model with buffers, an average of its weights, and a scaler, whose first scales may be too large."""
    case = Case(make_model=Normed)
    session, model = open_session(world, path, settings_of(case, mode)), make_case_model(case)
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.01), AveragedModel(model, use_buffers=True)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=bool(scale))
    session.attach(model, optimizer, average, scaler)
    data = make_data(case)
    for step in session:
        with step:
            for inputs, targets in step.batches(data):
                step.backward(*loss_sum(model, case, inputs, targets))
            step.update(after=lambda: average.update_parameters(model))
    return arrays(model) | {f"average {name}": values for name, values in arrays(average).items()}, scaler.get_scale()


@pytest.mark.parametrize(("mode", "ranks"), [("zero1", 2), ("zero1", 3), ("zero2", 2), ("zero2", 3)])
@pytest.mark.parametrize("scale", [0.0, 4.0, 2.0**127])
def test_buffers_averages_and_scalers_are_those_of_ddp(mode: str, ranks: int, scale: float, tmp_path: Path) -> None:
    results = {}
    for name in ("ddp", mode):
        path = make_folder(tmp_path / name, settings_of(Case(), name))
        results[name] = run_ranks(train_like_ddp, ranks, tmp_path, path, name, scale)
    for (actual, actual_scale), (expected, expected_scale) in zip(results[mode], results["ddp"], strict=True):
        assert actual_scale == expected_scale
        check_close(actual, expected, rtol=1e-4, atol=1e-6)
        check_close(actual, results[mode][0][0], rtol=0, atol=0)


def save_moments(world: World, path: Path) -> str:
    session, model = open_session(world, path, settings_of(Case(), "zero1")), make_case_model(Case())
    [optimizer] = adamw(model)
    session.attach(model, optimizer)
    data = make_data(Case())
    try:
        for step in session:
            with step:
                for inputs, targets in step.batches(data):
                    step.backward(*loss_sum(model, Case(), inputs, targets))
                step.update()
            optimizer.state_dict()
    except UsageError as error:
        return error.render()
    return ""


def test_a_state_that_no_rank_has_is_refused_with_the_file_that_has_it(tmp_path: Path) -> None:
    for error in run_ranks(save_moments, 2, tmp_path, make_folder(tmp_path / "run", settings_of(Case(), "zero1"))):
        assert error.startswith("error: the program called AdamW.state_dict()")
        assert "optimizer.safetensors" in error


def train_in_parts(world: World, path: Path) -> str:
    session, model = open_session(world, path, settings_of(Case(), "zero1")), make_case_model(Case())
    optimizers = two_optimizers(model)
    session.attach(model, *optimizers)
    data = make_data(Case())
    try:
        for step in session:
            with step:
                with step.part(optimizers[1]):
                    for inputs, targets in step.batches(data):
                        step.backward(*loss_sum(model, Case(), inputs, targets))
                step.update()
    except UsageError as error:
        return error.render()
    return ""


def test_a_step_in_parts_is_refused_with_the_method_that_can(tmp_path: Path) -> None:
    for error in run_ranks(train_in_parts, 2, tmp_path, make_folder(tmp_path / "run", settings_of(Case(), "zero1"))):
        assert error.startswith("error: sync.mode=zero1 cannot update a part of the step's optimizers")
        assert "--sync ddp" in error

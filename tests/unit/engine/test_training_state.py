"""The state of a training as tensors and values: any optimizer, scheduler and model, without pickle."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from shoal.engine.training_state import StateTree, TrainingState, allocate, check_trainable, fill, flatten, unflatten
from shoal.errors import CheckpointError, UsageError

CPU = torch.device("cpu")


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(tokens)))
        return out


def train(model: nn.Module, *optimizers: Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        tokens = torch.arange(6) % 7 + 0 * step
        model(tokens).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "fused": lambda model: AdamW(model.parameters(), lr=0.1, fused=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, centered=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}


def through_wire(tree: StateTree) -> StateTree:
    """Send a tree as a joining rank gets it: a description as JSON, then the tensors."""
    received = allocate(json.loads(json.dumps(tree.describe())), torch.device("cpu"))
    assert received.has_shape_of(tree)
    fill(received.tensors, tree.tensors)
    return received


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joining_rank_continues_as_the_source_does(name: str) -> None:
    source, joiner = TiedModel(), TiedModel()
    one, two = OPTIMIZERS[name](source), OPTIMIZERS[name](joiner)
    train(source, one)
    sent, target = TrainingState(source, [one]), TrainingState(joiner, [two])
    target.load_weights({name: tensor.clone() for name, tensor in sent.weights().items()})
    target.load_optimizer_state(through_wire(sent.optimizer_state()))
    assert sent.digest() == target.digest()
    for model, optimizer in ((source, one), (joiner, two)):
        train(model, optimizer)
    assert sent.digest() == target.digest()


def test_a_state_of_the_same_shape_is_loaded_in_place() -> None:
    model = TiedModel()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = TrainingState(model, [optimizer])
    before = through_wire(state.optimizer_state())
    places = {name: tensor.data_ptr() for name, tensor in state.optimizer_state().tensors.items()}
    train(model, optimizer)
    assert state.optimizer_state().digest() != before.digest()
    state.load_optimizer_state(before)
    assert state.optimizer_state().digest() == before.digest()
    assert {name: tensor.data_ptr() for name, tensor in state.optimizer_state().tensors.items()} == places


def test_schedulers_parameter_groups_and_averages_belong_to_the_state() -> None:
    def make() -> tuple[TrainingState, Optimizer, Any]:
        torch.manual_seed(0)
        model = TiedModel()
        groups: list[dict[str, Any]] = [
            {"params": [model.embedding.weight], "lr": 0.5},
            {"params": list(model.norm.parameters())},
        ]
        optimizer = SGD(groups, lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=[0.5, 0.1], total_steps=20)
        average = torch.optim.swa_utils.AveragedModel(model)
        return TrainingState(model, [optimizer], [scheduler, average]), optimizer, scheduler

    (one, optimizer, scheduler), (two, _, _) = make(), make()
    for _ in range(3):
        train(one.model, optimizer, steps=1)
        scheduler.step()
        one.others[1].update_parameters(one.model)  # type: ignore[attr-defined]
    two.load_weights(one.weights())
    two.load_optimizer_state(through_wire(one.optimizer_state()))
    assert one.digest() == two.digest()
    assert two.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert two.others[0].last_epoch == 3  # type: ignore[attr-defined]


def test_names_are_those_of_the_parameters_and_tied_weights_occur_once() -> None:
    model = TiedModel()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = TrainingState(model, [optimizer])
    assert "model.head.weight" not in state.weights()
    assert "model.norm.running_mean" in state.weights()
    assert "model.cache" not in state.weights(), "it is not persistent"
    assert "optimizer.state.embedding.weight.exp_avg" in state.optimizer_state().tensors


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = TiedModel()
    compiled = cast(nn.Module, torch.compile(model))
    assert TrainingState(compiled).weights().keys() == TrainingState(model).weights().keys()


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, 2: {"b": [True, None, (1, "x")]}},
        {"$tensor": "not one"},
        {"t": torch.arange(3), "deep": [{"t": torch.tensor(2.5)}]},
        [],
        {"inf": float("inf")},
    ],
)
def test_flatten_and_unflatten_are_inverse(state: Any) -> None:
    tree = flatten("x", state)
    again = unflatten(json.loads(json.dumps(tree.values)), tree.tensors)
    assert repr(again) == repr(state)


def test_an_object_that_is_no_data_is_refused_with_its_path() -> None:
    with pytest.raises(UsageError, match=r"the state of optimizer\.callback is a .*function"):
        flatten("optimizer", {"callback": copy.copy})


def test_a_lambda_schedule_keeps_only_its_numbers() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    assert TrainingState(model, [optimizer], [scheduler]).optimizer_state().values[1]["lr_lambdas"] == [None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (nn.LazyLinear(3), []), "has no shape yet"),
        (lambda: (nn.Linear(2, 2).requires_grad_(False), []), "no parameter that is trained"),
        (lambda: (nn.Embedding(3, 2, sparse=True), None), "sparse gradients"),
        (lambda: (nn.Linear(2, 2), [SGD(nn.Linear(2, 2).parameters(), lr=1)]), "not parameters of the model"),
        (lambda: (nn.Linear(2, 2), []), "no optimizer updates the parameter weight and 1 others"),
        (lambda: (nn.Linear(2, 2, device="meta"), None), "weight is on meta, and this rank computes on cpu"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], Any], message: str) -> None:
    model, optimizers = make()
    if optimizers is None:
        optimizers = [SGD(model.parameters(), lr=1)]
    with pytest.raises(UsageError, match=message):
        check_trainable(TrainingState(model, optimizers), CPU)


def test_a_frozen_parameter_needs_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    state = TrainingState(model, [SGD(model[1].parameters(), lr=1)])
    check_trainable(state, CPU)
    assert list(state.parameters()) == ["1.weight", "1.bias"]


def test_a_state_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1, momentum=0.9)
    state = TrainingState(model, [optimizer])
    with pytest.raises(CheckpointError, match=r"has \(2, 3\) torch.float32 for model.weight"):
        state.load_weights(TrainingState(other).weights())
    with pytest.raises(CheckpointError, match="the states of 2 objects, and 1 are attached"):
        state.load_optimizer_state(
            TrainingState(model, [optimizer], [CosineAnnealingLR(optimizer, 3)]).optimizer_state()
        )


def test_a_schedule_is_taken_back_more_than_once() -> None:
    """Also where the rate is a tensor that a compiled step has captured."""
    model = TiedModel()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False)
    schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=20)
    state = TrainingState(model, [optimizer], [schedule])
    rate, kept = optimizer.param_groups[0]["lr"], state.copy_schedule()
    before = copy.deepcopy([state.copy_schedule().digest(), schedule.state_dict()])
    for _ in range(2):
        train(model, optimizer)
        schedule.step()
        assert state.copy_schedule().digest() != before[0]
        state.load_schedule(kept)
        assert [state.copy_schedule().digest(), schedule.state_dict()] == before
        assert optimizer.param_groups[0]["lr"] is rate

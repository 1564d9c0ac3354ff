"""Mistakes in a user's loop that would train something else without a word.

Exercises engine.misuse, engine.agreement.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.engine.session import Session, Step
from shoal.errors import ShoalError, UsageError
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.sessions import make_folder, open_session

INPUTS = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
SETTINGS: dict[str, Any] = {"train": {"steps": 4, "global_batch": 12, "pin": "off"}}
Program = Callable[[Session], None]


def make_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))


def attach(session: Session, model: nn.Module, *others: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    session.attach(model, optimizer, *others)
    return optimizer


def train(session: Session, do_step: Callable[[Step, Tensor, Tensor], object]) -> None:
    for step in session:
        with step:
            for inputs, labels in step.batches((INPUTS, LABELS)):
                do_step(step, inputs, labels)
            step.update()


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(inputs), labels, reduction=reduction)


def run_program(world: World, path: Path, program: Program) -> tuple[str, str, int | None]:
    """Return the error that ends the program: its type, its text and its exit code."""
    try:
        program(open_session(world, path, SETTINGS))
    except ShoalError as error:
        return type(error).__name__, error.render(), error.exit_code
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception(error)), None
    return "", "", None


def check_refused(program: Program, ranks: int, words: tuple[str, ...], folder: Path) -> None:
    path = make_folder(folder / "run", SETTINGS)
    for kind, text, code in run_ranks(run_program, ranks, folder, path, program):
        assert (kind, code) == (UsageError.__name__, 2), text
        for part in words:
            assert part in " ".join(text.split()), text
        assert "next:" in text
    ledger = path / "commits.jsonl"
    assert not ledger.exists() or not read_jsonl(ledger), "a step was trained"


# Programs of ranks that differ.


def other_width(session: Session) -> None:
    attach(session, model := make_model(4 + session.rank))
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


def frozen_on_one(session: Session) -> None:
    model = make_model()
    model[0].requires_grad_(session.rank == 0)
    attach(session, model)
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


def more_layers(session: Session) -> None:
    model = make_model()
    if session.rank:
        model.append(nn.Linear(2, 2))
    attach(session, model)
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


def other_rate(session: Session) -> None:
    attach(session, model := make_model(), lr=0.1 * (1 + session.rank))
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


def other_optimizer(session: Session) -> None:
    model = make_model()
    kind = torch.optim.AdamW if session.rank else torch.optim.SGD
    session.attach(model, kind(model.parameters(), lr=0.1))
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (other_width, ("rank 0 has the parameter 0.weight with 4 × 8 numbers of type float32", "rank 1 the parameter",
                       "5 × 8")),
        (frozen_on_one, ("float32, and rank 1 the parameter 0.weight", "float32, frozen")),
        (more_layers, ("rank 1 the parameter 3.weight with 2 × 2",)),
        (other_rate, ("rank 0 has the group 0 of SGD", "lr=0.1,", "lr=0.2,")),
        (other_optimizer, ("the group 0 of SGD", "the group 0 of AdamW")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_ranks_that_train_different_things_are_refused(
    program: Program, words: tuple[str, ...], tmp_path: Path
) -> None:
    check_refused(program, 2, ("the ranks train different things", *words), tmp_path)


# What a plain loop does itself.


def own_backward(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: loss_of(model, x, y).backward())


def backward_beside(session: Session) -> None:
    attach(session, model := make_model())

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(loss_of(model, x, y))
        loss_of(model, x, y).backward()

    train(session, do_step)


def backward_between_steps(session: Session) -> None:
    attach(session, model := make_model())

    @session.every(1)
    def probe() -> None:
        loss_of(model, INPUTS, LABELS).backward()

    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


def own_step(session: Session) -> None:
    optimizer = attach(session, model := make_model())

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(loss_of(model, x, y))
        optimizer.step()

    train(session, do_step)


def own_zero_grad(session: Session) -> None:
    optimizer = attach(session, model := make_model())

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(loss_of(model, x, y))
        optimizer.zero_grad()

    train(session, do_step)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


def scaled_twice(session: Session) -> None:
    attach(session, model := make_model(), scaler := make_scaler())
    train(session, lambda step, x, y: step.backward(scaler.scale(loss_of(model, x, y))))


def scaler_steps(session: Session) -> None:
    optimizer = attach(session, model := make_model(), scaler := make_scaler())

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(loss_of(model, x, y))
        scaler.step(optimizer)

    train(session, do_step)


def own_scaler_steps(session: Session) -> None:
    """The scaler is not attached: only the optimizer's step is seen."""
    optimizer, scaler = attach(session, model := make_model()), make_scaler()

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(scaler.scale(loss_of(model, x, y)))
        scaler.step(optimizer)

    train(session, do_step)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (own_backward, ("another backward than step.backward", "write step.backward(loss) in place of")),
        (backward_beside, ("another backward than step.backward",)),
        (own_step, ("the program called SGD.step()", "call step.update() where it was")),
        (own_zero_grad, ("step 1 has lost gradients", "optimizer.zero_grad()")),
        (scaled_twice, ("the program called GradScaler.scale()", "the scaler is attached")),
        (scaler_steps, ("the program called GradScaler.step()",)),
        (own_scaler_steps, ("the program called SGD.step()",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_session_does_itself_is_refused_beside_it(
    program: Program, words: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    check_refused(program, ranks, words, tmp_path)


def test_a_backward_between_two_steps_is_refused(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", SETTINGS)
    [(kind, text, _)] = run_ranks(run_program, 1, tmp_path, path, backward_between_steps)
    assert (kind, "another backward" in " ".join(text.split())) == (UsageError.__name__, True), text


def use_objects_afterwards(session: Session) -> None:
    """Everything is the program's own again after the loop, and `autograd.grad` and zero_grad are harmless in it."""
    optimizer = attach(session, model := make_model(), scaler := make_scaler())

    def do_step(step: Step, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        step.backward(loss_of(model, x, y))

    train(session, do_step)
    scaler.scale(loss_of(model, INPUTS, LABELS)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert "scale" not in vars(scaler)


def test_what_changes_no_replica_is_allowed(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", SETTINGS)
    assert run_ranks(run_program, 2, tmp_path, path, use_objects_afterwards) == [("", "", None)] * 2
    assert len(read_jsonl(path / "commits.jsonl")) == 4


# The scale of a loss


def mean(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y, reduction="mean")))


def mean_with_count(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y, reduction="mean"), count=len(x)))


def both_counts(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y), count=len(x), mean_of=len(x)))


def sum_as_mean(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y) + loss_of(model, x, y), mean_of=len(x)))


def text_as_count(session: Session) -> None:
    attach(session, model := make_model())
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y), count="batch"))  # type: ignore[arg-type]


def own_batches(session: Session) -> None:
    """Take batches from a loader beside the session, as a loop that is half converted does."""
    attach(session, model := make_model())
    for step in session:
        with step:
            step.backward(loss_of(model, INPUTS[:6], LABELS[:6]))
            step.update()


def wrapped(session: Session) -> None:
    model = make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model) if session.world_size > 1 else None
    attach(session, ddp or model)
    train(session, lambda step, x, y: step.backward(loss_of(model, x, y)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_that_are_not_of_the_step_are_refused(ranks: int, tmp_path: Path) -> None:
    check_refused(own_batches, ranks, ("step.batches was not called", "in step.batches(dataset)"), tmp_path)


def test_a_model_in_ddp_is_refused(tmp_path: Path) -> None:
    check_refused(wrapped, 2, ("wrapped in DistributedDataParallel", "attach the model itself"), tmp_path)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (sum_as_mean, ("said to be the mean of 12 terms, and it is a sum", "step.backward(loss, count=12)")),
        (text_as_count, ("step.backward got count='batch'", "step.backward(loss, count=len(inputs))")),
        (mean, ("the loss of a micro-batch of 12 samples is a mean", "step.backward(loss, mean_of=len(inputs))")),
        (mean_with_count, ("the loss of a micro-batch of 12 terms is a mean",)),
        (both_counts, ("step.backward got mean_of=12 and count=12",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mean_is_refused_with_the_line_to_write(program: Program, words: tuple[str, ...], tmp_path: Path) -> None:
    check_refused(program, 1, words, tmp_path)


def train_by_mean(world: World, path: Path, is_mean: bool) -> list[float]:
    session = open_session(world, path, SETTINGS)
    attach(session, model := make_model())

    def do_step(step: Step, inputs: Tensor, labels: Tensor) -> None:
        if is_mean:
            # The number of terms is often a tensor.
            terms: Any = (labels >= 0).sum()
            step.backward(loss_of(model, inputs, labels, reduction="mean"), mean_of=terms)
        else:
            step.backward(loss_of(model, inputs, labels))

    train(session, do_step)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_a_mean_with_its_count_trains_as_the_sum_does(tmp_path: Path) -> None:
    weights, losses = [], []
    for is_mean in (False, True):
        path = make_folder(tmp_path / f"run-{is_mean}", SETTINGS)
        weights.append(run_ranks(train_by_mean, 2, tmp_path, path, is_mean)[0])
        losses.append([commit["loss"] for commit in read_jsonl(path / "commits.jsonl")])
    assert weights[0] == pytest.approx(weights[1], abs=1e-6)
    assert losses[0] == pytest.approx(losses[1])
    assert 0.3 < losses[0][0] < 1.5


def sum_over_tokens(session: Session) -> None:
    model = make_model()
    attach(session, model)

    def do_step(step: Step, inputs: Tensor, labels: Tensor) -> None:
        logits = model(inputs[:, None, :].expand(-1, 5, -1)).flatten(0, 1)
        step.backward(F.cross_entropy(logits, labels.repeat_interleave(5), reduction="sum"))

    train(session, do_step)


def test_a_sum_of_other_terms_than_samples_is_noted_once(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", SETTINGS)
    assert run_ranks(run_program, 2, tmp_path, path, sum_over_tokens) == [("", "", None)] * 2
    events = read_jsonl(path / "events" / "rank-0.jsonl") + read_jsonl(path / "events" / "rank-1.jsonl")
    [warning] = [event for event in events if event["event"] == "warning"]
    assert warning["seen"] == "the loss of a micro-batch of 6 samples is a sum of 30 terms"
    assert warning["fix"] == "for the mean over the terms: step.backward(loss, count=30)"

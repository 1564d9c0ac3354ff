"""A loss that is not finite on one rank: no rank applies the step, and every rank reports the same cause.

Exercises engine.refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.engine.refusal import RefusedStep, explain
from shoal.engine.replica import Replica
from shoal.engine.saving import replica_state
from shoal.engine.step import TrainingStep
from shoal.errors import RunFailed
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.trainings import GptTraining, make_run

# Step 7 is the first bad one. In the outer modes other ranks learn of it up to eight steps later, after a round.
BAD = 7
WAYS: dict[str, tuple[str, ...]] = {
    "fp32": ("sync.inside=gloo",),
    "shared": (),
    "int8": ("sync.wire=int8", "sync.inside=gloo"),
    "fp16": ("sync.wire=fp16", "sync.inside=gloo"),
    "powersgd": ("sync.wire=powersgd:2", "sync.inside=gloo"),
    "diloco": ("sync.mode=diloco", "sync.every=5"),
    "local": ("sync.mode=local", "sync.every=20"),
    "streaming": ("sync.mode=streaming", "sync.every=8", "sync.fragments=2", "sync.overlap=3"),
}
SHORT = {"fp32", "int8", "diloco"}
Poison = Callable[[Replica], None]


def bad_batch(replica: Replica) -> None:
    """Make the loss of one step nan; the replica's weights stay intact."""

    def spoil(module: nn.Module, inputs: Any, loss: Tensor) -> Tensor:
        return loss * math.nan if replica.progress.step + 1 == BAD else loss

    replica.model.register_forward_hook(spoil)


def bad_weight(replica: Replica) -> None:
    """Make a weight of this replica infinite: its later gradients and sums are not finite either."""

    def spoil(module: nn.Module, inputs: Any) -> None:
        if replica.progress.step + 1 == BAD:
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] = math.inf

    replica.model.register_forward_pre_hook(spoil)


def bad_gradient(replica: Replica) -> None:
    """Make the gradient infinite; the loss stays finite."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.inf if replica.progress.step + 1 == BAD else gradient

    next(replica.model.parameters()).register_hook(spoil)


def train(world: World, run: Path, poison: Poison, bad_ranks: tuple[int, ...]) -> tuple[str, bool]:
    """Return the error that ended the training, and whether the common parameters are still finite."""
    training = GptTraining(world, run)

    def before_step(replica: Replica) -> None:
        if replica.progress.step == 0 and world.rank in bad_ranks:
            poison(replica)

    try:
        training.train(before_step)
    except RunFailed as error:
        replica = training.replica
        assert replica.outer.replicas_differ or replica.progress.step == BAD - 1
        with replica.outer.common():
            is_sound = all(tensor.isfinite().all() for tensor in replica_state(replica).values())
        return error.render(), is_sound
    raise AssertionError("the training did not fail")


def train_queued(world: World, run: Path, poison: Poison, bad_ranks: tuple[int, ...]) -> tuple[str, bool]:
    """Train as on a GPU, where the update is queued before loss and norm are known."""
    TrainingStep._can_queue_update = property(lambda step: step._replica.steps.nonfinite is None)  # type: ignore[method-assign, assignment]
    return train(world, run, poison, bad_ranks)


def run_poisoned(
    folder: Path,
    way: str,
    poison: Poison,
    bad_ranks: tuple[int, ...] = (1,),
    train: Callable[..., tuple[str, bool]] = train,
) -> tuple[str, list[bool]]:
    """Return the error, which is the same on all ranks, and the second result of `train` per rank. Check that no commit
    and no checkpoint contains the bad step."""
    common = ("train.steps=30", "train.global_batch=6", "train.eval_every=100", "train.compile=off", "train.pin=off")
    run = make_run(folder, 2, *common, "train.checkpoint_every=6", *WAYS[way])
    ended = run_ranks(train, 2, folder, run.path, poison, bad_ranks)
    assert len({error for error, _ in ended}) == 1
    assert [commit["step"] for commit in read_jsonl(run.commits)] == list(range(1, BAD))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000006"]
    return ended[0][0], [is_sound for _, is_sound in ended]


@pytest.mark.parametrize("way", [way if way in SHORT else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
def test_a_bad_batch_is_reported_and_applied_by_no_rank(way: str, tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, way, bad_batch)
    assert error.startswith(
        f"error: a loss was not finite in step {BAD}: that of rank 1 on samples 39 to 41 became nan; "
        "no rank has applied or committed the step\n"
    )
    assert "shoal train --resume RUN" in error
    assert is_sound == [True, True]


@pytest.mark.parametrize("way", ["fp32", "diloco"])
@pytest.mark.parametrize("poison", [bad_batch, bad_gradient])
def test_a_queued_update_of_a_bad_step_changes_nothing(way: str, poison: Poison, tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, way, poison, train=train_queued)
    assert f"not finite in step {BAD}" in error or f"in step {BAD} on every rank" in error
    assert is_sound == [True, True]


def late_weight(replica: Replica) -> None:
    """Make a weight nan between the loss and its gradient."""

    def spoil(module: nn.Module, inputs: Any, loss: Tensor) -> None:
        if replica.progress.step + 1 == BAD:
            bad_weight_now(module)
            loss.register_hook(lambda gradient: gradient * math.nan)

    replica.model.register_forward_hook(spoil)


def bad_weight_now(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).data.view(-1)[0] = math.nan


def test_a_weight_that_goes_bad_after_the_loss_names_its_rank(tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, "fp32", late_weight)
    assert error.startswith(
        f"error: the gradient norm was not finite in step {BAD}: weights of rank 1 are not finite either, and those of "
        "the others are; no rank has applied or committed the step\n"
    )
    assert is_sound == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("way", ["shared", "diloco", "local", "streaming"])
def test_a_weight_that_is_not_finite_reaches_no_other_rank(way: str, tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, way, bad_weight)
    assert f"in step {BAD}: that of rank 1 on samples 39 to 41 became nan" in error
    assert is_sound[0]


@pytest.mark.long
def test_with_outer_steps_the_rank_of_a_bad_gradient_is_reported(tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, "diloco", bad_gradient)
    assert f"a gradient norm was not finite in step {BAD}: that of rank 1 on samples 39 to 41 became" in error
    assert is_sound == [True, True]


@pytest.mark.long
def test_a_training_that_diverges_on_every_rank_names_no_rank(tmp_path: Path) -> None:
    error, is_sound = run_poisoned(tmp_path, "fp32", bad_batch, bad_ranks=(0, 1))
    assert error.startswith(f"error: the loss became nan in step {BAD} on every rank\n")
    assert "why:  the training diverged" in error
    assert "next: train with a lower learning rate" in error
    assert is_sound == [True, True]


def test_the_first_bad_step_is_reported_and_its_loss_before_its_norm() -> None:
    later = RefusedStep(0, step=9, loss="inf", norm="nan", samples=(0, 4))
    spoiled = RefusedStep(1, step=8, loss="finite", norm="nan", samples=(4, 8))
    culprit = RefusedStep(5, step=8, loss="inf", norm="nan", samples=(8, 12))
    error = explain([later, spoiled, culprit], 3, "use a lower rate")
    assert "in step 8: that of rank 5 on samples 8 to 11 became inf;" in error.seen
    alone = explain([RefusedStep(0, step=8, loss="finite", norm="inf", samples=(0, 4))], 1, "use a lower rate")
    assert alone.seen == "the gradient norm became inf in step 8"
    assert alone.fix == "use a lower rate, or use --wire fp32 if a shorter format was used"

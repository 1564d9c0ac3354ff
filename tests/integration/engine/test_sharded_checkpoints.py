"""A checkpoint of a divided model is whole: any number of ranks and any method continues from it.

Exercises engine.sharded_checkpoint, engine.saving, engine.resume.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from shoal.engine import sharded_checkpoint
from shoal.engine.sharded_checkpoint import TensorFile
from shoal.errors import CheckpointError, PeerLost
from shoal.sync.world import World
from tests.integration.engine.test_sharded_session import Scaled, check_close, convolutions, small
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.sessions import make_folder, open_session

Make = Callable[[], tuple[nn.Module, list[Optimizer]]]

STEPS, EVERY, BATCH, LENGTH = 12, 3, 12, 5
INPUTS = torch.linspace(-2, 2, 60 * LENGTH).sin().view(60, LENGTH)


def with_adamw() -> tuple[nn.Module, list[Optimizer]]:
    model = small()
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)]


def with_adagrad() -> tuple[nn.Module, list[Optimizer]]:
    """Its state is there before the first step."""
    model = convolutions()
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.2)]


def with_scalars() -> tuple[nn.Module, list[Optimizer]]:
    """NAdam has two numbers without dimensions for each parameter, and a parameter has none either."""
    model = Scaled()
    return model, [torch.optim.NAdam(model.parameters(), lr=0.01)]


def with_asgd() -> tuple[nn.Module, list[Optimizer]]:
    model = Scaled()
    return model, [torch.optim.ASGD(model.parameters(), lr=0.05, t0=2)]


def with_two() -> tuple[nn.Module, list[Optimizer]]:
    model = small()
    first, *others = model.parameters()
    optimizers: list[Optimizer] = [torch.optim.AdamW(others, lr=0.01)]
    return model, [*optimizers, torch.optim.SGD([first], lr=0.05, momentum=0.9)]


def settings_of(mode: str) -> dict[str, Any]:
    inside = {"inside": "gloo"} if mode == "ddp" else {}
    train = {"steps": STEPS, "global_batch": BATCH, "checkpoint_every": EVERY, "keep_checkpoints": 9, "pin": "off"}
    return {"train": train, "sync": {"mode": mode, "bucket_mb": 0.001, **inside}}


def train_on_rank(world: World, path: Path, mode: str, make: Make, stop_after: int) -> Any:
    torch.manual_seed(3)
    session = open_session(world, path, settings_of(mode))
    model, optimizers = make()
    session.attach(model, *optimizers)
    for step in session:
        if step.number == stop_after:
            session.stop()
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().sum())
            step.update(clip=1.0)
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def train(path: Path, mode: str, ranks: int, make: Make, stop_after: int = 0) -> Any:
    make_folder(path, settings_of(mode))
    results = run_ranks(train_on_rank, ranks, path.parent, path, mode, make, stop_after)
    for own in results[1:]:
        check_close(own, results[0], rtol=0, atol=0)
    return results[0]


CHAIN = [("zero1", 3), ("zero1", 2), ("ddp", 1), ("zero2", 3)]


@pytest.mark.parametrize("make", [with_adamw, with_adagrad, with_scalars, with_asgd, with_two])
def test_a_training_continues_with_other_ranks_and_methods(make: Make, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", "ddp", 1, make)
    for number, (mode, ranks) in enumerate(CHAIN):
        weights = train(tmp_path / "chain", mode, ranks, make, stop_after=(number + 1) * EVERY)
    check_close(weights, expected, rtol=1e-4, atol=1e-6)
    whole, chain = (read_jsonl(tmp_path / name / "commits.jsonl") for name in ("whole", "chain"))
    assert [commit["step"] for commit in chain] == list(range(1, STEPS + 1))
    losses = [[commit["loss"] for commit in commits] for commits in (whole, chain)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    files = [f"checkpoints/step-{STEPS:08d}/{name}.safetensors" for name in ("model", "optimizer")]
    for file in files:
        one, other = load_file(tmp_path / "whole" / file), load_file(tmp_path / "chain" / file)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_flipped_bit_in_the_moments_is_found(tmp_path: Path) -> None:
    train(tmp_path / "run", "zero1", 2, with_adamw, stop_after=2 * EVERY)
    path = tmp_path / f"run/checkpoints/step-{2 * EVERY:08d}/optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    train(tmp_path / "run", "zero1", 2, with_adamw)
    warnings = [event for event in read_jsonl(tmp_path / "run/events/rank-0.jsonl") if event["event"] == "warning"]
    assert any("optimizer.safetensors" in str(event) for event in warnings), warnings


def fail_to_write(world: World, path: Path, full_from: int) -> tuple[str, int]:
    """Train with a disk that is full while moments are written from this step on; return the error and the step."""
    write, session_step = TensorFile.write, [0]

    def write_some(file: TensorFile, name: str, tensor: torch.Tensor) -> None:
        if session_step[0] >= full_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, name, tensor)

    sharded_checkpoint.TensorFile.write = write_some  # type: ignore[method-assign,assignment]
    session = open_session(world, path, settings_of("zero1"))
    model, optimizers = with_adamw()
    session.attach(model, *optimizers)
    try:
        for step in session:
            with step:
                for (inputs,) in step.batches((INPUTS,)):
                    step.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().sum())
                session_step[0] = step.number
                step.update()
    except (CheckpointError, PeerLost) as error:
        return error.seen, session.step
    return "", session.step


def test_a_full_disk_leaves_the_older_checkpoint_and_ends_with_its_reason(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of("zero1"))
    [main, other] = run_ranks(fail_to_write, 2, tmp_path, path, 2 * EVERY, deadline_s=90)
    assert "No space left on device" in main[0]
    assert (main[1], other[1]) == (STEPS, STEPS), "a full disk before the end is a warning"
    names = sorted(folder.name for folder in (path / "checkpoints").glob("step-*"))
    assert names == [f"step-{EVERY:08d}"]
    warnings = [event for event in read_jsonl(path / "events/rank-0.jsonl") if event["event"] == "warning"]
    assert sum("No space left" in str(event) for event in warnings) >= STEPS // EVERY - 2

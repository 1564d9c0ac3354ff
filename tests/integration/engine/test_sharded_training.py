"""What a divided model has learned is what one process learns, and its records prove how it was divided.

Exercises sync.sharded, engine.sharded_checkpoint, engine.part_copies, records.sharded_parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from tests.support.programs import shoal
from tests.support.ranks import run_ranks
from tests.support.trainings import GptTraining, make_run

STEPS = 12
COMMON = (
    f"train.steps={STEPS}", "train.global_batch=12", "train.eval_every=100", "train.compile=off", "train.pin=off",
    "train.checkpoint_every=5",
)  # fmt: skip
NO_CLIPPING = "train.clip=1000"


def train(world: World, run: Path) -> None:
    GptTraining(world, run).train()


def train_ranks(folder: Path, ranks: int, *sets: str) -> RunFolder:
    run = make_run(folder, ranks, *COMMON, f"run.on=local:{ranks}", *sets)
    run_ranks(train, ranks, folder, run.path)
    return run


def learned(run: RunFolder, step: int = STEPS) -> dict[str, Tensor]:
    """Return weights and moments of a checkpoint."""
    folder = run.checkpoints / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_a_divided_model_learns_what_one_process_learns(mode: str, tmp_path: Path) -> None:
    alone = learned(train_ranks(tmp_path / "alone", 1))
    run = train_ranks(tmp_path / mode, 3, f"sync.mode={mode}")
    divided = learned(run)
    assert divided.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    verdict = verify_run(run)
    assert verdict.parts is not None
    assert (verdict.parts.parts, verdict.parts.ranks_each) == (3, 2)
    assert (verdict.parts.owned_once, verdict.parts.copies_equal) == (True, True)


def test_two_ranks_learn_the_same_bits_as_with_torchs_ddp(tmp_path: Path) -> None:
    """Without clipping: the norm of divided gradients is summed in another order. So is the gradient of a tied
    embedding in shoal's own DDP."""
    ddp = learned(train_ranks(tmp_path / "stock", 2, "sync.mode=stock", NO_CLIPPING))
    divided = learned(train_ranks(tmp_path / "zero1", 2, "sync.mode=zero1", NO_CLIPPING))
    assert divided.keys() == ddp.keys()
    assert all(torch.equal(divided[name], tensor) for name, tensor in ddp.items())


def test_verify_prints_the_parts_and_names_a_copy_that_is_not_its_owners(tmp_path: Path) -> None:
    run = train_ranks(tmp_path, 3, "sync.mode=zero1")
    printed = shoal("verify", str(run.path)).stdout
    assert "parts: 3, each on 2 ranks, " in printed
    assert " elements owned once; copies equal" in printed
    lines = run.events(2).read_text().splitlines()
    index = next(number for number, line in enumerate(lines) if '"digest"' in line)
    event = json.loads(lines[index])
    event["parts"][1]["sha256"] = "0" * 64
    lines[index] = json.dumps(event)
    run.events(2).write_text("\n".join(lines) + "\n")
    outcome = shoal("verify", str(run.path), "--json")
    assert outcome.returncode == 1
    verdict = json.loads(outcome.stdout)
    assert (verdict["ok"], verdict["parts"]["owned_once"], verdict["parts"]["copies_equal"]) == (False, True, False)
    [text] = [finding["text"] for finding in verdict["findings"] if "part" in finding["text"]]
    assert text == "the copy of the part of rank 1 on rank 2 is not what rank 1 has"

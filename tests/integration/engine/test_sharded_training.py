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
from tests.support.programs import TINY, shoal
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


@pytest.mark.parametrize(
    ("mode", "sets"),
    [("zero1", ()), ("zero2", ()), ("zero3", ()), ("zero3", ("train.recompute=true", "train.micro_batch=2"))],
)
def test_a_divided_model_learns_what_one_process_learns(mode: str, sets: tuple[str, ...], tmp_path: Path) -> None:
    alone = learned(train_ranks(tmp_path / "alone", 1))
    run = train_ranks(tmp_path / mode, 3, f"sync.mode={mode}", *sets)
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


SCRIPT = """
import sys

import torch

import shoal

class OwnOptimizer(torch.optim.SGD):
    pass

class OwnElementwise(torch.optim.SGD):
    elementwise = True

kinds = {
    "own": OwnOptimizer, "elementwise": OwnElementwise, "Adafactor": torch.optim.Adafactor, "LBFGS": torch.optim.LBFGS,
}
what = sys.argv[1]
session = shoal.Session(steps=3, global_batch=8)
model = torch.nn.Linear(40, 40)
optimizer = kinds.get(what, torch.optim.SGD)(model.parameters(), lr=0.01)
session.attach(model, optimizer)
for step in session:
    with step:
        if what == "part":
            with step.part(optimizer):
                pass
        for rows in step.batches(torch.ones(64, 40)):
            step.backward(model(rows).square().sum())
        step.update()
print("trained")
"""
REFUSED = {
    "part": "sync.mode=zero1 cannot update a part of the step's optimizers",
    "own": "class OwnOptimizer: elementwise = True",
    "Adafactor": "sync.mode=zero1 cannot divide the optimizer Adafactor",
    "LBFGS": "sync.mode=zero1 cannot divide the optimizer LBFGS",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_divided_is_refused_before_the_first_step(what: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = shoal("run", "--on", "local:2", "--sync", "zero1", "--out", tmp_path / "run", script, what)
    text = " ".join(done.stderr.split())
    assert (done.returncode, REFUSED[what] in text) == (2, True), done.stderr
    assert "ddp" in text, "what to use instead"
    assert "trained" not in done.stdout
    assert not RunFolder(tmp_path / "run").commits.exists() or not RunFolder(tmp_path / "run").commits.read_text()


def test_without_copies_the_start_says_what_a_lost_machine_means(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    without = shoal("run", "--on", "local:2", "--sync", "zero1", "--out", tmp_path / "run", script, "elementwise")
    text = " ".join(without.stderr.split())
    assert "note: a lost machine returns this run to its newest checkpoint (every 50 steps)" in text
    # The other half of 1,640 parameters, with two moments of four bytes.
    assert "A copy needs about 6.98 kB more a rank (with Adam): --copies 1" in text
    arguments = ("run", "--on", "local:2", "--sync", "zero1", "--copies", "1", "--out", tmp_path / "with")
    copied = shoal(*arguments, script, "elementwise")
    assert copied.returncode == 0, copied.stderr
    assert "a lost machine" not in copied.stderr


def test_a_training_of_the_gpt_shows_the_memory_of_a_rank_and_the_parts(tmp_path: Path) -> None:
    sets = (*TINY, "train.steps=2", "train.global_batch=12", "train.micro_batch=2")
    tiny = [word for setting in sets for word in ("--set", setting)]
    done = shoal("train", "grammar", "--on", "local:3", "--sync", "zero2", *tiny, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stderr.split())
    assert "memory: a rank needs about 60" in text
    assert "each part is on two ranks: a lost machine loses no step" in text
    run = RunFolder(tmp_path / "run")
    assert shoal("report", run.path).returncode == 0
    page = (run.path / "report.html").read_text()
    assert "<dt>parts</dt><dd>3<small>zero2: each on 2 ranks, which keep 67% of the moments and gradients<" in page
    manifest = json.loads(run.manifest.read_text())
    # Two reduce-scatters of two thirds each, the sums for the copies, and the weights that no copy has made.
    thirds = 2 * 2 + 1 + 1
    assert manifest["theoretical_bytes_per_step"] == pytest.approx(thirds / 3 * 4 * manifest["model_params"])


def test_a_class_that_says_it_is_elementwise_is_divided(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = shoal("run", "--on", "local:2", "--sync", "zero1", "--out", tmp_path / "run", script, "elementwise")
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--wire", "powersgd:4"),
            "--wire powersgd:4 needs whole matrices, and zero1 divides them: use another wire",
        ),
        (("--measure", "barrier"), "--measure barrier takes the all-reduce out of DDP: it needs --sync ddp"),
        (("--inside", "shared"), "--inside shared needs --sync ddp: zero1 sends by gloo"),
    ],
)
def test_settings_that_do_not_go_with_a_divided_model_are_refused(
    arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    done = shoal("train", "grammar", "--sync", "zero1", *arguments, "--out", tmp_path / "run")
    assert (done.returncode, text in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (tmp_path / "run").exists()

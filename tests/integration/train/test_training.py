"""Whole trainings through the command line: one rank equals many, resuming is exact, launchers agree.

Exercises train.gpt_training, `shoal train`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import TINY, read_jsonl, set_flags, shoal, steps_of, train_tiny

FIFTY = ("train.steps=50", "train.global_batch=12", "train.eval_every=25", "train.checkpoint_every=20")
TIMES = ("data_s", "forward_s", "backward_s", "exposed_s", "wait_s", "optimizer_s", "other_s")


class Runs(dict[int, tuple[Path, dict[str, Any]]]):
    """The same training by number of ranks, run when first requested."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, ranks: int) -> tuple[Path, dict[str, Any]]:
        folder = self._folder / f"on-{ranks}"
        self[ranks] = folder, train_tiny(folder, "--on", f"local:{ranks}", sets=FIFTY)
        return self[ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_ranks_have_the_losses_of_one_rank(runs: Runs, ranks: int) -> None:
    alone, together = steps_of(runs[1][0]), steps_of(runs[ranks][0])
    assert [step["step"] for step in together] == list(range(1, 51))
    for one, many in zip(alone, together, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-4), f"step {one['step']}"
        assert many["tokens"] == one["tokens"]
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.3


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_are_equal_to_the_bit(runs: Runs, ranks: int) -> None:
    folder, manifest = runs[ranks]
    assert manifest["byte_equivalent"] is True
    states = {(folder / f"state-rank-{rank}.safetensors").read_bytes() for rank in range(ranks)}
    assert len(states) == 1


def test_every_rank_reports_the_same_loss(runs: Runs) -> None:
    folder = runs[3][0]
    curves = {tuple(step["loss"] for step in steps_of(folder, rank)) for rank in range(3)}
    assert len(curves) == 1


def test_phases_add_up_to_the_step(runs: Runs) -> None:
    for step in steps_of(runs[2][0], rank=1):
        assert sum(step[name] for name in TIMES) == pytest.approx(step["step_s"], abs=1e-5)
        assert min(step[name] for name in TIMES) > -1e-6


def test_shards_add_up_and_record_their_first_sentence(runs: Runs) -> None:
    events = [read_jsonl(runs[3][0] / "events" / f"rank-{rank}.jsonl") for rank in range(3)]
    assert [rank_events[0]["event"] for rank_events in events] == ["start"] * 3
    shards = [event for rank_events in events for event in rank_events if event["event"] == "shard"]
    assert len(shards) == 3
    assert sum(shard["size"] for shard in shards) == shards[0]["total"]
    assert [shard["seed"] for shard in shards] == [35_000, 35_001, 35_002]
    log = (runs[3][0] / "logs/local/rank-2.log").read_text()
    assert f"rank 2 of 3: {shards[2]['size']:,} of {shards[2]['total']:,} samples, first: {shards[2]['first']}" in log


def test_the_ledger_has_every_sample_once(runs: Runs) -> None:
    commits = read_jsonl(runs[2][0] / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, 51))
    assert [commit["samples"] for commit in commits] == [[12 * step, 12 * step + 12] for step in range(50)]


def test_the_manifest_has_every_documented_field(runs: Runs) -> None:
    manifest = runs[2][1]
    assert manifest["world_size"] == 2
    assert manifest["seed"] == 35_000
    assert manifest["launcher"] == "shoal"
    assert manifest["model_params"] > 1000
    assert manifest["tokens_per_sec_2proc"] > 0
    assert manifest["allreduce_p50_ms"] > 0
    # Both ranks are on this machine: gradients use shared memory, the statistics of a step use gloo.
    assert (manifest["inside"], manifest["backend"], manifest["process_group"]) == ("shared", "shared memory", "gloo")
    assert (manifest["on"], manifest["lab"]) == ("local:2", None)
    [command] = manifest["commands"]
    assert command.startswith("shoal train ")
    assert "--on local:2" in command
    assert manifest["duration_s"] >= sum(step["step_s"] for step in steps_of(runs[2][0])) > 0
    assert manifest["theoretical_bytes_per_step"] == 0
    assert 0 < min(step["wire_bytes"] for step in steps_of(runs[2][0])) < manifest["model_params"]
    assert len(manifest["lesson_notes"]) > 100
    rows = read_jsonl(runs[2][0] / "timings.jsonl")
    assert len(rows) == 100
    assert {"step", "rank", "step_s", *TIMES} <= rows[0].keys()


def test_a_resumed_run_has_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    """Steps 41 to 50 run once in the whole run and once more from the checkpoint of step 40."""
    first = tmp_path / "first"
    shutil.copytree(runs[2][0], first)
    state = (first / "state-rank-1.safetensors").read_bytes()
    shutil.rmtree(first / "checkpoints" / "step-00000050")
    done = shoal("train", "--resume", first)
    assert done.returncode == 0, done.stderr
    assert "continues after step 40" in done.stderr
    steps = steps_of(first, rank=1)
    before, after = steps[40:50], steps[50:]
    assert [step["step"] for step in after] == list(range(41, 51))
    assert [(step["loss"], step["grad_norm"], step["lr"]) for step in after] == [
        (step["loss"], step["grad_norm"], step["lr"]) for step in before
    ]
    assert (first / "state-rank-1.safetensors").read_bytes() == state
    assert shoal("verify", first).returncode == 0


def test_a_changed_bit_is_reported(runs: Runs, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs[3][0], copy)
    victim = copy / "state-rank-2.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    done = shoal("verify", copy)
    assert done.returncode == 1
    assert "rank 2 differs from rank 0, first in optimizer.state." in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_other_launchers_give_the_same_training(runs: Runs, launcher: str, tmp_path: Path) -> None:
    manifest = train_tiny(tmp_path / "run", "--on", "local:2", "--launcher", launcher, sets=FIFTY)
    assert manifest["launcher"] == launcher
    assert manifest["final_loss"] == runs[2][1]["final_loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--sync", "stock"),
        pytest.param(("--measure", "barrier"), marks=pytest.mark.long),
        pytest.param(("--measure", "off"), marks=pytest.mark.long),
    ],
)
def test_other_ways_to_exchange_give_the_same_training(runs: Runs, flags: tuple[str, str], tmp_path: Path) -> None:
    manifest = train_tiny(tmp_path / "run", "--on", "local:2", *flags, sets=FIFTY)
    assert (manifest["allreduce_p50_ms"] is None) == bool({"off", "stock"} & {*flags})
    assert (manifest["phases"] == {}) == ("off" in flags)
    assert "hidden" not in manifest["lesson_notes"] or "stock" not in flags
    assert manifest["final_loss"] == pytest.approx(runs[2][1]["final_loss"], rel=1e-4)
    assert manifest["byte_equivalent"] is True


@pytest.mark.long
def test_accumulation_gives_the_same_training(runs: Runs, tmp_path: Path) -> None:
    manifest = train_tiny(tmp_path / "run", "--on", "local:2", "--micro-batch", "2", sets=FIFTY)
    assert manifest["strategy"]["accumulation"] == 3
    assert manifest["final_loss"] == pytest.approx(runs[2][1]["final_loss"], rel=1e-4)


@pytest.mark.long
def test_weak_scaling_and_modulo_shards_and_dropout(tmp_path: Path) -> None:
    settings = (
        "train.steps=4",
        "train.global_batch=6",
        "data.sharding=modulo",
        "members.on_loss=end",
        "model.dropout=0.1",
    )
    manifest = train_tiny(tmp_path / "run", "--on", "local:2", "--scaling", "weak", "--wire", "fp16", sets=settings)
    assert manifest["global_batch"] == 12
    assert manifest["byte_equivalent"] is True


@pytest.mark.long
def test_plain_torchrun_runs_the_worker(runs: Runs, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += ["-m", "shoal.train.worker", "grammar", "--out", str(tmp_path / "run"), *set_flags(*TINY, *FIFTY)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "run")[-1]["loss"] == steps_of(runs[2][0])[-1]["loss"]
    assert (tmp_path / "run" / "manifest.json").exists()
    config = (tmp_path / "run" / "config.toml").read_text()
    assert 'on = "local:2"' in config
    assert 'launcher = "torchrun"' in config


@pytest.mark.long
def test_sample_writes_sentences(runs: Runs) -> None:
    done = shoal("sample", runs[2][0], "--count", "3", "--prompt", "She ")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("She ") for line in lines)
    assert shoal("sample", runs[2][0], "--count", "3", "--prompt", "She ").stdout == done.stdout

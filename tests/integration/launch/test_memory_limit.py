"""A training on machines with too little memory: refused before it starts, or named when the kernel kills a rank.

Exercises launch.memory_check, `shoal doctor`, `shoal train`, agent.rank_processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal_lab.kernel import read_groups
from tests.support.labs import need_lab
from tests.support.programs import read_jsonl, set_flags, shoal

# The state has 1.99 GB.
SMALL_LAB = "lab:2,memory=1gb"
# The state has 240 MB, a micro-batch of 64 sequences 1 GB and more.
LARGE_BATCH = (
    "model.layers=1",
    "model.heads=2",
    "model.width=1024",
    "model.seq_len=1024",
    "data.tokenizer=byte",
    "train.global_batch=128",
    "train.micro_batch=64",
    "train.compile=off",
    "members.on_loss=end",
)


@pytest.fixture(autouse=True)
def need_memory_limits() -> None:
    need_lab()
    if read_groups().memory is None:
        pytest.skip("no control groups for memory here")


def test_train_refuses_a_preset_that_cannot_fit_before_there_is_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = shoal("train", "gpt2-124m", "--on", SMALL_LAB, "--device", "cpu", "--out", run)
    assert done.returncode == 2
    assert "error: gpt2-124m does not fit into the memory of node1 and node2" in done.stderr
    assert "every rank keeps 1.99 GB" in done.stderr
    assert not run.exists()


def test_doctor_compares_a_preset_with_the_memory_of_every_machine() -> None:
    words = ("doctor", "--on", SMALL_LAB, "--no-proof", "--json")
    done = shoal(*words, "--preset", "gpt2-124m", "--set", "train.device=cpu")
    assert done.returncode == 1
    findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["memory.training"]["severity"] == "error"
    assert "gpt2-124m does not fit into the memory of node1 and node2" in findings["memory.training"]["evidence"]
    small = json.loads(shoal(*words, "--preset", "grammar").stdout)
    assert "memory.training" in small["applicable"]
    assert "memory.training" not in [finding["id"] for finding in small["findings"]]
    assert "memory.training" not in json.loads(shoal(*words).stdout)["applicable"]


def test_doctor_refuses_a_setting_of_no_training() -> None:
    done = shoal("doctor", "--sync", "zero1")
    assert done.returncode == 2
    assert "--sync goes with --preset or --config" in done.stderr


def test_a_rank_that_its_memory_limit_killed_is_named_with_the_limit(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a bee sees the sea \n" * 30_000)
    words = ("train", "--data", text, "--out", run, "--on", "lab:2,memory=700mb", "--device", "cpu")
    done = shoal(*words, *set_flags(*LARGE_BATCH), timeout_s=150)
    assert done.returncode == 3
    assert "memory may not suffice" in done.stderr
    error = done.stderr[done.stderr.index("error: ") :]
    assert "was killed (SIGKILL) when node" in error
    assert "had reached its memory limit of 700 MB" in error
    assert "--micro-batch 32 (it was 64)" in error
    assert "--sync zero1, zero2 or zero3" in error
    journals = [event for path in run.glob("agents/*.jsonl") for event in read_jsonl(path)]
    limits = [event["memory_limit_bytes"] for event in journals if event["event"] == "ended" and event["out_of_memory"]]
    assert limits
    assert all(0.99 * 700e6 < limit <= 700e6 for limit in limits)

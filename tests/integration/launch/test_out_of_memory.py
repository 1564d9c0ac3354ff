"""A rank that runs out of memory reports how much it requested and which option to change.

Exercises launch.failure, engine.faults.
"""

from __future__ import annotations

import os
import random
import signal
import string
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.config.load import build_config
from shoal.control.rank_env import Placement
from shoal.cost.memory import out_of_memory_advice
from shoal.engine.faults import as_fault
from shoal.errors import OutOfMemory
from shoal.launch.failure import ProcessEnd, diagnose
from tests.support.programs import read_jsonl, set_flags, shoal_command

LIMIT_BYTES = 2 << 30
# The first layer's output alone has 128 × 2048 × 1024 numbers, 1.07 GB a rank; the model has 52 MB.
LARGE = (
    "model.layers=1",
    "model.heads=2",
    "model.width=1024",
    "model.seq_len=2048",
    "data.tokenizer=byte",
    "train.global_batch=256",
    "train.micro_batch=128",
    "train.compile=off",
)


@pytest.mark.long
def test_the_error_of_a_rank_without_memory_names_the_rank_and_a_smaller_micro_batch(tmp_path: Path) -> None:
    """A limit on the address space stands for a machine with little memory."""
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(1).choices(string.ascii_lowercase + " \n", k=700_000)))
    run = tmp_path / "run"
    command = shoal_command("train", "--data", text, "--out", run, "--on", "local:2", *set_flags(*LARGE))
    done = subprocess.run(
        ["/usr/bin/env", "prlimit", f"--as={LIMIT_BYTES}", *command],
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 3
    error = done.stderr[done.stderr.index("error: ") :]
    assert " on local is out of memory: it asked for 1.07 GB more" in error
    assert "next: start a new run with a smaller micro-batch: --micro-batch 64 (it was 128)" in error
    faults = [read_jsonl(run / "events" / f"rank-{rank}.jsonl")[-1] for rank in (0, 1)]
    assert any(fault["event"] == "fault" and fault["error"] == "OutOfMemory" for fault in faults)


def test_a_memory_error_in_a_communication_hook_is_recognised() -> None:
    """torch wraps the exception of its hook, as observed."""
    wrapped = "Got the following error when running the callback: MemoryError: <EMPTY MESSAGE>"
    place = Placement(rank=2, world_size=3, local_rank=0, local_world_size=1, node="attic")
    fault = as_fault(RuntimeError(wrapped), place, relief="less")
    assert isinstance(fault, OutOfMemory)
    assert fault.seen.startswith("rank 2 on attic is out of memory")
    assert not isinstance(as_fault(RuntimeError("shapes differ"), place, relief="less"), OutOfMemory)


def test_a_rank_that_the_kernel_killed_gets_the_same_advice() -> None:
    config = build_config("grammar", None, sets=("train.global_batch=24", "train.micro_batch=6"))
    ending = ProcessEnd("rank-1", "attic", (1,), -signal.SIGKILL, order=0, out_of_memory=True)
    error = diagnose([ending], {}, {}, out_of_memory_advice(config, 2))
    assert isinstance(error, OutOfMemory)
    assert error.seen == "rank 1 on attic was killed (SIGKILL) when the machine ran out of memory"
    first, second = error.fix.split("\n")
    assert first == "start a new run with a smaller micro-batch: --micro-batch 3 (it was 6)"
    assert second == "or divide what every rank keeps among the machines: --sync zero1, zero2 or zero3"
    assert "\n" not in out_of_memory_advice(config, 1)
    limited = diagnose([replace(ending, memory_limit_bytes=10**9)], {}, {}, "less")
    assert isinstance(limited, OutOfMemory)
    assert limited.seen == "rank 1 was killed (SIGKILL) when attic had reached its memory limit of 1 GB"


@pytest.mark.parametrize(
    ("present", "advice"),
    [
        (10, "--micro-batch 5 "),
        (5, "--micro-batch 2 "),
        (1, "a shorter --seq-len than 64: the micro-batch is 1 already"),
    ],
)
def test_the_advised_micro_batch_divides_the_batch(present: int, advice: str) -> None:
    config = build_config("grammar", None, sets=("train.global_batch=20", f"train.micro_batch={present}"))
    assert advice in out_of_memory_advice(config, 2)

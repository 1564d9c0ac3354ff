"""Trainings on a GPU: two ranks that share it, and ranks with and without one in one world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.engine.batches import TensorSource, read_ahead
from tests.support.needs import need_gpu
from tests.support.programs import read_jsonl, set_flags, shoal

SMALL = set_flags("model.layers=2", "model.width=128", "model.heads=2", "train.global_batch=12")


def train(run: Path, *options: str) -> list[dict[str, object]]:
    """Train, verify, and return the `start` event of every rank."""
    done = shoal("train", "--steps", "12", "--out", run, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout
    assert "identical: " in verified.stdout
    files = sorted((run / "events").glob("rank-*.jsonl"))
    return [next(event for event in read_jsonl(file) if event["event"] == "start") for file in files]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [(), ("--inside", "gloo"), ("--wire", "int8", "--inside", "gloo"), ("--sync", "diloco", "--every", "4")],
    ids=["shared memory", "gloo", "int8", "diloco"],
)
def test_two_ranks_share_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    need_gpu()
    starts = train(tmp_path / "run", "--on", "local:2", "--device", "cuda", *options)
    assert [(start["device"], start["backend"]) for start in starts] == [("cuda:0", "gloo")] * 2


@pytest.mark.gpu
def test_ranks_with_and_without_a_gpu_train_together(tmp_path: Path) -> None:
    need_gpu()
    devices = set_flags("run.devices=cuda/cpu/cpu", "run.weights=4/1/1")
    starts = train(tmp_path / "run", "--on", "local:3", *devices)
    assert [start["device"] for start in starts] == ["cuda:0", "cpu", "cpu"]
    assert [start["share"] for start in starts] == [4, 1, 1]


def test_a_rank_on_the_processor_reads_nothing_ahead() -> None:
    source = TensorSource((torch.arange(8),), is_single=True)
    assert read_ahead(source, None, 0, torch.device("cpu")) is None  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = shoal("train", "--on", "local:1", "--device", "cuda", "--out", tmp_path / "run", *SMALL)
    assert done.returncode != 0
    assert "is to use a GPU, but torch" in done.stderr
    assert "--device cpu" in done.stderr

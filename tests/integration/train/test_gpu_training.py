"""Trainings on a GPU: two ranks that share it, and ranks with and without one in one world.

Exercises train.gpt_training.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from shoal.engine.batches import TensorSource, read_ahead
from tests.support.needs import need_gpu
from tests.support.programs import events_of, read_jsonl, set_flags, shoal
from tests.support.runs import ended_afterwards, front, parts_of
from tests.support.waiting import wait_until

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
    [
        (),
        ("--inside", "gloo"),
        ("--wire", "int8", "--inside", "gloo"),
        ("--sync", "diloco", "--every", "4"),
        ("--sync", "zero1"),
        ("--sync", "zero1", "--wire", "int8"),
        ("--sync", "zero2"),
        ("--sync", "zero3", "--set", "train.compile=off"),
        ("--sync", "zero3", "--recompute", "--set", "model.dropout=0.1"),
        ("--recompute", "--compile", "on"),
    ],
    ids=[
        *("shared memory", "gloo", "int8", "diloco", "zero1", "zero1 in int8", "zero2", "zero3"),
        *("zero3 recomputed", "compiled and recomputed"),
    ],
)
def test_two_ranks_share_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    need_gpu()
    starts = train(tmp_path / "run", "--on", "local:2", "--device", "cuda", *options)
    assert [(start["device"], start["backend"]) for start in starts] == [("cuda:0", "gloo")] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "shares"), [("3/1", [9, 3]), ("4/1/1", [8, 2, 2])])
def test_ranks_with_and_without_a_gpu_train_together(weights: str, shares: list[int], tmp_path: Path) -> None:
    need_gpu()
    processors = ["cpu"] * (len(shares) - 1)
    devices = set_flags(f"run.devices={'/'.join(['cuda', *processors])}", f"run.weights={weights}")
    starts = train(tmp_path / "run", "--on", f"local:{len(shares)}", *devices)
    assert [start["device"] for start in starts] == ["cuda:0", *processors]
    assert [start["share"] for start in starts] == shares
    # They round differently, which is no fault of a machine.
    assert not events_of(tmp_path / "run", "divergence")


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3"])
def test_a_model_is_divided_over_ranks_with_and_without_a_gpu(level: str, tmp_path: Path) -> None:
    need_gpu()
    devices = set_flags("run.devices=cuda/cpu/cpu", "run.weights=2/1/1", "train.compile=off")
    starts = train(tmp_path / "run", "--on", "local:3", "--sync", level, *devices)
    assert [start["device"] for start in starts] == ["cuda:0", "cpu", "cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3"])
def test_one_gpu_alone_keeps_all_parts(level: str, tmp_path: Path) -> None:
    need_gpu()
    losses = []
    for sync in ("ddp", level):
        run = tmp_path / sync
        options = ("--on", "local:1", "--device", "cuda", "--sync", sync, *SMALL, *set_flags("train.compile=off"))
        done = shoal("train", "--steps", "12", "--out", run, *options)
        assert done.returncode == 0, done.stderr
        losses.append([record["loss"] for record in read_jsonl(run / "commits.jsonl")])
    # Plain training clips on the GPU, with other last bits.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.gpu
def test_a_killed_rank_an_interrupt_and_a_resumed_run_leave_nothing_on_the_gpu(tmp_path: Path) -> None:
    need_gpu()
    free_before = torch.cuda.mem_get_info(0)[0]
    lose_a_rank_then_interrupt_and_resume(tmp_path, "cuda")
    # The driver frees a process's memory a moment after its end.
    wait_until(lambda: abs(torch.cuda.mem_get_info(0)[0] - free_before) < 64 << 20, 10.0)


def lose_a_rank_then_interrupt_and_resume(folder: Path, device: str) -> None:
    run = folder / "run"
    # The first evaluation on a GPU compiles for seconds, and would count as a pause.
    where = ("--out", run, "--on", "local:2", "--device", device, "--set", "train.eval_every=1000000")
    with ended_afterwards(run), front(folder, "train", "--steps", "100000", *where, *SMALL) as training:
        wait_until(lambda: last_step(run) >= 20, 90.0, why=lambda: training.err)
        os.kill(parts_of(run)["rank-1"].pid, signal.SIGKILL)
        # Without the rank, and with it again.
        wait_until(lambda: len(events_of(run, "membership")) >= 3, 60.0, why=lambda: training.err)
        before = last_step(run)
        wait_until(lambda: last_step(run) > before + 10, 60.0, why=lambda: training.err)
        training.process.send_signal(signal.SIGINT)
        assert training.code(30.0) == 130, training.err
        assert not parts_of(run)
    _, away, back = (event["time"] for event in events_of(run, "membership")[:3])
    assert any(away < step["time"] < back for step in events_of(run, "step")), "the survivor waited for the lost rank"
    done = last_step(run)
    resumed = shoal("train", "--resume", run, "--steps", str(done + 5), "--detach")
    assert resumed.returncode == 0, resumed.stderr
    wait_until(lambda: last_step(run) == done + 5 and not parts_of(run), 60.0)
    assert [step["step"] for step in events_of(run, "step")] == list(range(1, done + 6))
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout


def last_step(run: Path) -> int:
    return max((int(event["step"]) for event in events_of(run, "step")), default=0)


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

"""Every way of exchanging gradients gives the sum that one process computes, with the same bits on all ranks.

Exercises sync.gradients.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.cost.buckets import fill_buckets
from shoal.cost.buckets import gradients as cost_gradients
from shoal.engine.training_state import TrainingState, digest_tensors
from shoal.errors import PeerLost
from shoal.model.gpt import GPT
from shoal.sync.compression.base import Bucket, NoState
from shoal.sync.gradients import HookedDDP, make_gradient_sync
from shoal.sync.replicas import broadcast_integers, broadcast_tensors, have_equal_digests
from shoal.sync.step_stats import CommTimes, StepGather, StopKind, sum_over_world
from shoal.sync.world import World, barrier
from tests.support.ranks import run_ranks

Gradients = dict[str, npt.NDArray[np.float32]]

SHAPE = ModelConfig(layers=2, heads=2, width=32, seq_len=8, vocab_size=50)
WAYS: list[dict[str, Any]] = [
    {"mode": "ddp", "measure": "hook", "inside": "gloo"},
    {"mode": "ddp", "measure": "hook", "inside": "copies"},
    {"mode": "ddp", "measure": "hook", "inside": "shared"},
    {"mode": "ddp", "measure": "off", "inside": "gloo"},
    {"mode": "ddp", "measure": "off"},
    {"mode": "ddp", "measure": "barrier"},
    {"mode": "ddp", "measure": "hook", "bucket_mb": 0.01},
    {"mode": "ddp", "measure": "hook", "bucket_mb": 0.01, "inside": "gloo"},
    {"mode": "ddp", "measure": "barrier", "bucket_mb": 0.01},
    {"mode": "ddp", "measure": "barrier", "inside": "gloo"},
    {"mode": "stock", "measure": "hook"},
]


def rows_of(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return torch.randint(0, SHAPE.vocab_size, (2, SHAPE.seq_len + 1), generator=generator)


def fresh_model() -> GPT:
    torch.manual_seed(1)
    return GPT(SHAPE)


def gradients(model: GPT) -> Gradients:
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def shares(size: int) -> list[int]:
    """Return unequal micro-batch counts: rank r has r + 1."""
    return [rank + 1 for rank in range(size)]


def exchange(world: World, settings: dict[str, Any]) -> tuple[Gradients, CommTimes]:
    model = fresh_model()
    sync = make_gradient_sync(SyncConfig(**settings), model, world)
    micros = shares(world.size)
    scale = sync.loss_scale(sum(micros) * 2 * SHAPE.seq_len)
    for micro in range(micros[world.rank]):
        rows = rows_of(world.rank, micro)
        sync.backward(sync.module(rows[:, :-1], rows[:, 1:]) * scale, last=micro == micros[world.rank] - 1)
    comm = sync.finish()
    return gradients(model), comm


def alone(size: int) -> Gradients:
    model = fresh_model()
    blocks = [rows_of(rank, micro) for rank, share in enumerate(shares(size)) for micro in range(share)]
    rows = torch.cat(blocks)
    (model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()).backward()
    return gradients(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("settings", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_the_sum_equals_that_of_one_process(settings: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    reference = alone(world_size)
    results = run_ranks(exchange, world_size, tmp_path, settings)
    for summed, comm in results:
        assert summed.keys() == reference.keys()
        for name, gradient in summed.items():
            np.testing.assert_allclose(gradient, reference[name], rtol=1e-4, atol=1e-6)
            assert gradient.tobytes() == results[0][0][name].tobytes(), f"{name} differs between ranks"
        assert comm.tail_s >= 0
        is_timed = settings["measure"] != "off" and settings["mode"] != "stock"
        assert (comm.allreduce_s is not None) == (comm.hidden_s is not None) == is_timed


def train_after_closing(world: World, settings: dict[str, Any]) -> tuple[bool, Gradients]:
    """Close an exchange; return whether it is freed, and the gradients that its model then computes alone."""
    model = fresh_model()
    # Few enough tokens that DDP leaves the tied weight to the exchange.
    sync = make_gradient_sync(SyncConfig(**settings), model, world, tokens=SHAPE.seq_len // 2)
    rows = rows_of(world.rank, 0)[:1, : SHAPE.seq_len // 2 + 1]
    for _ in range(3):
        sync.backward(sync.module(rows[:, :-1], rows[:, 1:]), last=True)
        sync.finish()
        model.zero_grad(set_to_none=True)
    barrier(world)
    assert (sync.extra_bytes > 0) == (settings["mode"] == "ddp" and settings["inside"] != "shared")
    reducer = getattr(sync, "_ddp", sync)
    held = weakref.ref(reducer)
    sync.close()
    del sync, reducer
    gc.collect()
    if world.rank == 0:
        # The other ranks do not take part: an exchange would wait for them forever.
        model(rows[:, :-1], rows[:, 1:]).backward()
    return held() is None, gradients(model)


@pytest.mark.parametrize(
    "settings", [WAYS[0], WAYS[1], WAYS[2], WAYS[-1]], ids=lambda way: "-".join(map(str, way.values()))
)
def test_a_closed_exchange_leaves_the_model_unchanged(settings: dict[str, Any], tmp_path: Path) -> None:
    (is_freed, computed), _ = run_ranks(train_after_closing, 2, tmp_path, settings)
    assert is_freed
    model, rows = fresh_model(), rows_of(0, 0)[:1, : SHAPE.seq_len // 2 + 1]
    model(rows[:, :-1], rows[:, 1:]).backward()
    for name, gradient in gradients(model).items():
        np.testing.assert_allclose(computed[name], gradient, rtol=1e-4, atol=1e-6)


def pipeline_threads(world: World, measure: str) -> tuple[list[str], list[str]]:
    """Return the threads of the shared-memory pipeline while the exchange is open and after it is closed."""
    model = fresh_model()
    sync = make_gradient_sync(SyncConfig(measure=measure, inside="copies"), model, world)
    rows = rows_of(world.rank, 0)
    sync.backward(sync.module(rows[:, :-1], rows[:, 1:]), last=True)
    sync.finish()
    barrier(world)

    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("sum inside")]

    before = running()
    sync.close()
    return before, running()


@pytest.mark.parametrize("measure", ["barrier", "hook"])
def test_closing_an_exchange_ends_its_shared_memory_pipeline(measure: str, tmp_path: Path) -> None:
    for before, after in run_ranks(pipeline_threads, 2, tmp_path, measure):
        assert len(before) == 1
        assert after == []


def exchange_twice(world: World, settings: dict[str, Any]) -> Gradients:
    model = fresh_model()
    for chosen in (settings, {"wire": "bf16", "inside": "gloo"}):
        sync = make_gradient_sync(SyncConfig(**chosen), model, world, tokens=SHAPE.seq_len // 2)
        rows = rows_of(world.rank, 0)[:1, : SHAPE.seq_len // 2 + 1]
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            sync.backward(sync.module(rows[:, :-1], rows[:, 1:]), last=True)
            sync.finish()
        barrier(world)
        sync.close()
    return gradients(model)


@pytest.mark.parametrize("settings", [WAYS[0], WAYS[2]], ids=["gloo", "shared"])
def test_one_exchange_can_follow_another(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ranks(exchange_twice, 2, tmp_path, settings)
    model = fresh_model()
    for rank in range(2):
        rows = rows_of(rank, 0)[:1, : SHAPE.seq_len // 2 + 1]
        model(rows[:, :-1], rows[:, 1:]).backward()
    for name, gradient in gradients(model).items():
        assert first[name].tobytes() == second[name].tobytes()
        np.testing.assert_allclose(first[name], gradient, rtol=1e-2, atol=1e-2)


def test_fp16_is_close_and_keeps_replicas_equal(tmp_path: Path) -> None:
    reference = alone(2)
    (first, _), (second, _) = run_ranks(exchange, 2, tmp_path, {"wire": "fp16", "inside": "gloo"})
    for name, gradient in first.items():
        assert gradient.tobytes() == second[name].tobytes()
        np.testing.assert_allclose(gradient, reference[name], rtol=2e-3, atol=5e-5)
    assert any((first[name] != exact).any() for name, exact in reference.items())


def message_sizes(world: World, settings: dict[str, Any]) -> list[int]:
    """Return the parameter count of every message of a second backward, after DDP has seen the order of gradients."""
    messages: list[int] = []

    class Counted(NoState):
        def __call__(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
            messages.append(bucket.flat.numel())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.flat)
            return done

    torch.manual_seed(1)
    sync = HookedDDP(GPT(ModelConfig(**settings["model"])), world, Counted(), settings["bucket_mb"])
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        messages.clear()
        sync.backward(sync.module(tokens, tokens), last=True)
    return messages


@pytest.mark.parametrize("bucket_mb", [0.05, 0.2, 25.0])
def test_buckets_match_those_of_the_plan(bucket_mb: float, tmp_path: Path) -> None:
    model = {"layers": 3, "heads": 2, "width": 64, "seq_len": 8, "vocab_size": 300}
    [messages] = run_ranks(message_sizes, 1, tmp_path, {"model": model, "bucket_mb": bucket_mb})
    planned = fill_buckets(cost_gradients(ModelConfig(**model)), bucket_mb)
    assert messages == [bucket.parameters for bucket in planned]


def lose_peer(world: World, steps: int) -> list[float]:
    """End rank 1 before it sends its last step; return the losses that rank 0 still has of its own steps."""
    exchange = StepGather(world, lag=steps)
    for step in range(steps):
        if world.rank == 1 and step == steps - 1:
            os._exit(0)
        exchange.begin(2.5 + step, CommTimes(time.perf_counter(), 0.0, 0.0), stop=StopKind.NO)
    with pytest.raises(PeerLost):
        exchange.drain()
    return exchange.own_losses()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_rank_keeps_its_own_losses_when_their_exchange_fails(steps: int, tmp_path: Path) -> None:
    """The samples of the step are used, so this rank must report them to the ledger."""
    losses, _ = run_ranks(lose_peer, 2, tmp_path, steps, dying=[1])
    assert losses == [2.5 + step for step in range(steps)]


def slow_rank(world: World, where: str) -> tuple[float, float, bool]:
    """Delay rank 1 by 0.2 s in every step; rank 0 requests a stop in the third."""
    exchange = StepGather(world)
    late_s = 0.2 if world.rank == 1 else 0.0
    for step in range(3):
        time.sleep(late_s if where == "compute" else 0.0)
        ready_at = time.perf_counter()
        barrier(world)
        comm = CommTimes(ready_at, time.perf_counter() - ready_at, 0.0)
        exchange.begin(float(world.rank + 1), comm, stop=StopKind(world.rank == 0 and step == 2))
        time.sleep(late_s if where == "optimizer" else 0.0)
        [shared] = exchange.finish()
    return shared.loss_sum, shared.wait_s, bool(shared.stop)


@pytest.mark.parametrize("where", ["compute", "optimizer"])
def test_ranks_share_loss_wait_time_and_stop_request(where: str, tmp_path: Path) -> None:
    (loss_0, wait_0, stop_0), (loss_1, wait_1, stop_1) = run_ranks(slow_rank, 2, tmp_path, where)
    assert loss_0 == loss_1 == 3.0
    assert stop_0
    assert stop_1
    assert wait_0 == pytest.approx(0.2, abs=0.1)
    assert wait_1 == pytest.approx(0.0, abs=0.1)


def make_unequal_then_equal(world: World) -> tuple[bool, bool, list[int], list[float]]:
    torch.manual_seed(world.rank)
    model = GPT(SHAPE)
    before = have_equal_digests(world, digest_tensors(TrainingState(model).weights()))
    broadcast_tensors(world, 0, TrainingState(model).weights().values())
    after = have_equal_digests(world, digest_tensors(TrainingState(model).weights()))
    return before, after, broadcast_integers(world, 1, [world.rank, 7]), sum_over_world(world, [1.5, world.rank])


def test_replicas_are_compared_and_copied(tmp_path: Path) -> None:
    for before, after, broadcast, summed in run_ranks(make_unequal_then_equal, 3, tmp_path):
        assert not before
        assert after
        assert broadcast == [1, 7]
        assert summed == [4.5, 3.0]


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one failed")


def test_run_ranks_reports_the_first_failure(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank one failed"):
        run_ranks(fail_on_one, 2, tmp_path)

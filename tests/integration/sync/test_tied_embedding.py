"""The gradient of the tied weight in two parts: the same sum as in one, and the larger part first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.futures import Future

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.config.sync_choice import WIRE_FORMATS, WireChoice
from shoal.cost.buckets import split_tied
from shoal.model.gpt import GPT
from shoal.sync.compression.base import Bucket, NoState
from shoal.sync.gradients import HookedDDP, TiedHead, is_worth_splitting, make_gradient_sync
from shoal.sync.world import World
from tests.support.ranks import run_ranks

# Many words, of which a step uses a few.
SHAPE = ModelConfig(layers=2, heads=2, width=16, seq_len=8, vocab_size=500)
SEQUENCES = 2
TOKENS = SEQUENCES * SHAPE.seq_len
TIED = "token.weight"
STEPS = 3
Arrays = dict[str, npt.NDArray[np.float32]]


def rows_of(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    # Some words come more than once, in one rank and in both.
    return torch.randint(SHAPE.vocab_size // 10, (SEQUENCES, SHAPE.seq_len + 1), generator=generator)


def micros_of(rank: int) -> int:
    return rank + 1


def step_alone(model: GPT, step: int, size: int) -> None:
    blocks = [rows_of(rank, step, micro) for rank in range(size) for micro in range(micros_of(rank))]
    rows = torch.cat(blocks)
    (model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()).backward()


def gradients(model: GPT) -> Arrays:
    return {name: each.grad.clone().numpy() for name, each in model.named_parameters() if each.grad is not None}


def fresh() -> GPT:
    torch.manual_seed(5)
    return GPT(SHAPE)


def alone(size: int) -> list[Arrays]:
    model, found = fresh(), []
    for step in range(STEPS):
        step_alone(model, step, size)
        found.append(gradients(model))
        model.zero_grad(set_to_none=True)
    return found


def together(world: World, settings: dict[str, Any]) -> list[Arrays]:
    model, found = fresh(), []
    sync = make_gradient_sync(SyncConfig(inside="gloo", **settings), model, world, tokens=TOKENS)
    assert model.take_head is not None
    assert sync.extra_bytes == TOKENS * (8 + 4 * SHAPE.width) * world.size // 2
    micros = micros_of(world.rank)
    scale = sync.loss_scale(sum(micros_of(rank) for rank in range(world.size)) * TOKENS)
    for step in range(STEPS):
        for micro in range(micros):
            rows = rows_of(world.rank, step, micro)
            with sync.micro_batch(last=micro == micros - 1):
                (sync.module(rows[:, :-1], rows[:, 1:]) * scale).backward()
        times = sync.finish()
        assert times.tail_s > 0
        found.append(gradients(model))
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    results = run_ranks(together, size, tmp_path, {})
    for step, exact in enumerate(alone(size)):
        for found in results:
            assert found[step].keys() == exact.keys()
            for name, gradient in found[step].items():
                np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=1e-6)
                assert gradient.tobytes() == results[0][step][name].tobytes(), f"{name} differs between ranks"


@pytest.mark.parametrize("wire", [str(WireChoice(name)) for name in WIRE_FORMATS if name != "fp32"])
def test_it_goes_by_any_wire_and_replicas_stay_equal(wire: str, tmp_path: Path) -> None:
    results = run_ranks(together, 2, tmp_path, {"wire": wire})
    exact = alone(2)
    for step in range(STEPS):
        for name in exact[step]:
            assert results[0][step][name].tobytes() == results[1][step][name].tobytes()
    # Of rank 4 it points about the same way; all others are near.
    near = 1.0 if wire.startswith("powersgd") else 0.02
    assert np.linalg.norm(results[0][0][TIED] - exact[0][TIED]) < near * np.linalg.norm(exact[0][TIED])


def order(world: World) -> list[tuple[int, int, bool]]:
    """Index, numbers and place of every message; those of the second step, when DDP's buckets are settled."""
    messages: list[tuple[int, int, bool]] = []

    class Told(NoState):
        def __call__(self, bucket: Bucket) -> Future[torch.Tensor]:
            messages.append((bucket.index, bucket.flat.numel(), bucket.is_last))
            done: Future[torch.Tensor] = Future()
            done.set_result(bucket.flat)
            return done

    model = fresh()
    wire = Told()
    tied = TiedHead(model.get_parameter(TIED), TOKENS, world, wire)
    model.take_head = tied.take
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [TIED])
    sync = HookedDDP(model, world, wire, bucket_mb=0.01, tied=tied)
    for step in range(2):
        messages.clear()
        rows = rows_of(0, step, 0)
        with sync.micro_batch(last=True):
            sync.module(rows[:, :-1], rows[:, 1:]).backward()
        sync.finish()
    return messages


def test_the_heads_part_is_sent_first_and_once(tmp_path: Path) -> None:
    [messages] = run_ranks(order, 1, tmp_path)
    head = SHAPE.vocab_size * SHAPE.width
    assert messages[0] == (-1, head, False)
    assert len(messages) > 3
    assert [index for index, _, _ in messages[1:]] == list(range(len(messages) - 1))
    rest = sum(each.numel() for each in fresh().parameters()) - head
    assert sum(numbers for _, numbers, _ in messages[1:]) == rest
    assert [last for _, _, last in messages] == [False] * (len(messages) - 1) + [True]
    planned = split_tied(SHAPE, TOKENS, 2, bucket_mb=0.01)
    assert [bucket.parameters for bucket in planned[:-1]] == [numbers for _, numbers, _ in messages]
    assert 4 * planned[-1].parameters == TOKENS * (8 + 4 * SHAPE.width)


def left_to_ddp(world: World) -> tuple[bool, bool]:
    many, few = fresh(), fresh()
    make_gradient_sync(SyncConfig(inside="gloo"), many, world, tokens=SHAPE.vocab_size)
    make_gradient_sync(SyncConfig(inside="gloo"), few, world)
    return many.take_head is None, few.take_head is None


def test_a_batch_that_touches_most_rows_is_left_to_ddp(tmp_path: Path) -> None:
    assert run_ranks(left_to_ddp, 2, tmp_path) == [(True, True)] * 2


def test_it_pays_for_few_rows_of_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(paying, 2, tmp_path) == [[True, True, False]] * 2
    assert run_ranks(paying, 1, tmp_path) == [[False] * 3]


def paying(world: World) -> list[bool]:
    weight = torch.empty(1000, 2)
    return [is_worth_splitting(weight, tokens, world) for tokens in (10, 124, 125)]

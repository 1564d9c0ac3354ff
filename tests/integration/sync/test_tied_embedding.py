"""The gradient of the tied weight in two parts: the same sum as in one part, and the larger part is sent first.

Exercises sync.gradients, model.gpt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.futures import Future

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.cost.buckets import split_tied
from shoal.model.gpt import GPT
from shoal.sync.compression.base import Bucket, NoState
from shoal.sync.gradients import HookedDDP, TiedHead, is_worth_splitting, make_gradient_sync
from shoal.sync.world import World
from tests.support.ranks import run_ranks

# A large vocabulary, of which a step uses a few tokens.
SHAPE = ModelConfig(layers=2, heads=2, width=16, seq_len=8, vocab_size=500)
SEQUENCES = 2
TOKENS = SEQUENCES * SHAPE.seq_len
TIED = "token.weight"
STEPS = 3
Arrays = dict[str, npt.NDArray[np.float32]]


def rows_of(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    # Some tokens occur more than once, in one rank and in both. The last micro-batches of the ranks differ in size.
    sequences = max(1, SEQUENCES - rank)
    return torch.randint(SHAPE.vocab_size // 10, (sequences, SHAPE.seq_len + 1), generator=generator)


def micros_of(rank: int) -> int:
    return rank + 1


def step_alone(model: GPT, step: int, size: int) -> None:
    blocks = [rows_of(rank, step, micro) for rank in range(size) for micro in range(micros_of(rank))]
    rows = torch.cat(blocks)
    (model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()).backward()


def gradients(model: GPT) -> Arrays:
    return {name: weight.grad.clone().numpy() for name, weight in model.named_parameters() if weight.grad is not None}


def fresh() -> GPT:
    torch.manual_seed(5)
    return GPT(SHAPE)


def alone(size: int) -> list[Arrays]:
    model, gradients_by_step = fresh(), []
    for step in range(STEPS):
        step_alone(model, step, size)
        gradients_by_step.append(gradients(model))
        model.zero_grad(set_to_none=True)
    return gradients_by_step


def together(world: World, settings: dict[str, Any]) -> list[Arrays]:
    model, gradients_by_step = fresh(), []
    sync = make_gradient_sync(SyncConfig(inside="gloo", **settings), model, world, tokens=TOKENS)
    assert model.take_head is not None
    assert sync.extra_bytes == TOKENS * (8 + 4 * SHAPE.width) * world.size // 2
    micros = micros_of(world.rank)
    sequences = sum(micros_of(rank) * len(rows_of(rank, 0, 0)) for rank in range(world.size))
    scale = sync.loss_scale(sequences * SHAPE.seq_len)
    for step in range(STEPS):
        for micro in range(micros):
            rows = rows_of(world.rank, step, micro)
            sync.backward(sync.module(rows[:, :-1], rows[:, 1:]) * scale, last=micro == micros - 1)
        times = sync.finish()
        assert times.tail_s > 0
        gradients_by_step.append(gradients(model))
        model.zero_grad(set_to_none=True)
    return gradients_by_step


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_equals_that_of_one_process(size: int, tmp_path: Path) -> None:
    results = run_ranks(together, size, tmp_path, {})
    for step, exact in enumerate(alone(size)):
        for result in results:
            assert result[step].keys() == exact.keys()
            for name, gradient in result[step].items():
                np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=1e-6)
                assert gradient.tobytes() == results[0][step][name].tobytes(), f"{name} differs between ranks"


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "powersgd:4"])
def test_every_wire_keeps_replicas_equal(wire: str, tmp_path: Path) -> None:
    results = run_ranks(together, 2, tmp_path, {"wire": wire})
    exact = alone(2)
    for step in range(STEPS):
        for name in exact[step]:
            assert results[0][step][name].tobytes() == results[1][step][name].tobytes()
    # PowerSGD of rank 4 has about the same direction; all others are close.
    tolerance = 1.0 if wire.startswith("powersgd") else 0.02
    assert np.linalg.norm(results[0][0][TIED] - exact[0][TIED]) < tolerance * np.linalg.norm(exact[0][TIED])


def sent_messages(world: World) -> list[tuple[int, int, bool]]:
    """Return index, element count and is_last of every message of the second step, when DDP's buckets are final."""
    messages: list[tuple[int, int, bool]] = []

    class Recorded(NoState):
        def __call__(self, bucket: Bucket) -> Future[torch.Tensor]:
            messages.append((bucket.index, bucket.flat.numel(), bucket.is_last))
            done: Future[torch.Tensor] = Future()
            done.set_result(bucket.flat)
            return done

    model = fresh()
    wire = Recorded()
    tied = TiedHead(model.get_parameter(TIED), TOKENS, world, wire)
    model.take_head = tied.take
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [TIED])
    sync = HookedDDP(model, world, wire, bucket_mb=0.01, tied=tied)
    for step in range(2):
        messages.clear()
        rows = rows_of(0, step, 0)
        sync.backward(sync.module(rows[:, :-1], rows[:, 1:]), last=True)
        sync.finish()
    return messages


def test_the_heads_gradient_is_sent_first_and_once(tmp_path: Path) -> None:
    [messages] = run_ranks(sent_messages, 1, tmp_path)
    head = SHAPE.vocab_size * SHAPE.width
    assert messages[0] == (-1, head, False)
    assert len(messages) > 3
    assert [index for index, _, _ in messages[1:]] == list(range(len(messages) - 1))
    rest = sum(weight.numel() for weight in fresh().parameters()) - head
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


def test_splitting_pays_for_few_rows_of_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(splitting_pays, 2, tmp_path) == [[True, True, False]] * 2
    assert run_ranks(splitting_pays, 1, tmp_path) == [[False] * 3]


def splitting_pays(world: World) -> list[bool]:
    weight = torch.empty(1000, 2)
    return [is_worth_splitting(weight, tokens, world) for tokens in (10, 124, 125)]

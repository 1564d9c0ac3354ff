"""A killed rank is `PeerLost` on every other rank, wherever that one waits for it.

Exercises sync.communication.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.engine.state_transfer import broadcast_json, gather_json
from shoal.model.gpt import GPT
from shoal.sync.gradients import make_gradient_sync
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.outer import make_outer_sync
from shoal.sync.replicas import broadcast_integers, broadcast_tensors, gather_integers
from shoal.sync.step_stats import sum_over_world
from shoal.sync.world import World, _form_gpu_group, await_ranks, barrier, with_second_group
from tests.support.ranks import run_ranks

SHAPE = ModelConfig(layers=1, heads=2, width=16, seq_len=8, vocab_size=500)
Wait = Callable[[World], Callable[[], object]]


def gradient_exchange(**settings: Any) -> Wait:
    def make(world: World) -> Callable[[], object]:
        model = GPT(SHAPE)
        config = SyncConfig.model_validate({"inside": "gloo", "timeout_s": 20.0} | settings)
        tokens = torch.zeros(1, SHAPE.seq_len, dtype=torch.int64)
        sync = make_gradient_sync(config, model, world, tokens=tokens.numel())

        def step() -> None:
            sync.backward(sync.module(tokens, tokens), last=True)
            sync.finish()
            model.zero_grad(set_to_none=True)

        return step

    return make


def outer_exchange(**settings: Any) -> Wait:
    def make(world: World) -> Callable[[], object]:
        outer = make_outer_sync(SyncConfig.model_validate(settings), nn.Linear(8, 8), world, weight=0.5)
        steps = iter(range(1, 100))
        return lambda: [outer.after_inner_step(next(steps), last=False) for _ in range(4)]

    return make


def one(call: Callable[[World], object]) -> Wait:
    return lambda world: lambda: call(world)


WAITS: dict[str, Wait] = {
    "hooked ddp": gradient_exchange(),
    "stock ddp": gradient_exchange(mode="stock"),
    "fp16": gradient_exchange(wire="fp16"),
    "int8": gradient_exchange(wire="int8"),
    "powersgd": gradient_exchange(wire="powersgd"),
    "no overlap": gradient_exchange(measure="barrier"),
    "shared memory": gradient_exchange(inside="shared"),
    "copies": gradient_exchange(inside="copies"),
    "making ddp": lambda world: lambda: gradient_exchange(mode="stock")(world),
    "diloco": outer_exchange(mode="diloco", every=4),
    "streaming": outer_exchange(mode="streaming", every=4, fragments=1, overlap=1),
    "barrier": one(barrier),
    "sum": one(lambda world: sum_over_world(world, [1.0])),
    "integers": one(lambda world: (gather_integers(world, [1]), broadcast_integers(world, 1, [1]))),
    "tensors": one(lambda world: broadcast_tensors(world, 1, [torch.zeros(3)])),
    "documents": one(lambda world: (gather_json(world, {}), broadcast_json(world, 1, {}))),
    "second group": one(lambda world: with_second_group(world, timeout_s=2.0)),
}


def lose_the_other(world: World, waits: str, is_elastic: bool) -> str:
    """Do the exchange twice; then rank 1 dies, and rank 0 tries once more."""
    if is_elastic:
        world = replace(world, release=GroupInterrupt())
    exchange = WAITS[waits](world)
    for _ in range(2):
        exchange()
    if world.rank == 1:
        os._exit(0)
    try:
        # A send to a closed connection may still succeed.
        for _ in range(3):
            exchange()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("is_elastic", [pytest.param(True, id="elastic"), pytest.param(False, id="fixed")])
@pytest.mark.parametrize("waits", WAITS)
def test_a_killed_rank_is_a_lost_peer(waits: str, is_elastic: bool, tmp_path: Path) -> None:
    error, _ = run_ranks(lose_the_other, 2, tmp_path, waits, is_elastic, dying=[1])
    assert error.startswith("RankMissing: " if waits == "second group" else "PeerLost: ")


class Unlucky(nn.Module):
    """A model of a user that reads from a server."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        outputs.register_hook(self.fail)
        return outputs

    def fail(self, _: torch.Tensor) -> None:
        raise RuntimeError("Connection reset by peer")


def fail_in_backward(world: World) -> str:
    sync = make_gradient_sync(SyncConfig.model_validate({"inside": "gloo"}), Unlucky(), world)
    try:
        sync.backward(sync.module(torch.ones(2, 4)).sum(), last=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_of_the_model_with_the_same_words_is_not_a_lost_peer(tmp_path: Path) -> None:
    assert run_ranks(fail_in_backward, 2, tmp_path) == ["RuntimeError: Connection reset by peer"] * 2


def test_what_waits_in_another_way_is_aborted_once_with_its_generation() -> None:
    release, aborted = GroupInterrupt(), []
    release.at_end(lambda: aborted.append(1))
    release.end()
    release.begin()
    release.end()
    assert aborted == [1]


def test_ranks_that_meet_learn_each_others_devices() -> None:
    store = dist.HashStore()
    store.set("here/1", "gpu 7")
    assert await_ranks(store, 0, 2, timeout_s=1.0, word="cpu") == ("cpu", "gpu 7")


@pytest.mark.parametrize("devices", [["cpu", "gpu 7"], ["gpu 7", "gpu 7"], ["gpu 7"], ["cpu", "cpu"]])
def test_nccl_is_left_out_unless_every_rank_has_a_gpu_of_its_own(devices: list[str]) -> None:
    assert _form_gpu_group(devices, torch.device("cpu"), 1.0, None) is None

"""A rank that waits inside DDP, in C++, is released when its generation ends.

Exercises sync.interruptible.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.sync.compression.base import Fp32
from shoal.sync.gradients import HookedDDP, StockDDP
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.world import World
from tests.support.ranks import run_ranks

MAKE: dict[str, Callable[[nn.Module, World], HookedDDP | StockDDP]] = {
    "hooked": lambda model, world: HookedDDP(model, world, Fp32(world), bucket_mb=1.0),
    "stock": StockDDP,
}


def train_and_lose_peer(way: str, steps: int, world: World) -> tuple[bool, bool]:
    """Train this many steps; then rank 1 stops taking part and rank 0's generation ends. Return whether that
    happened, and whether rank 1 was still connected when rank 0 stopped waiting for it."""
    release = GroupInterrupt()
    world = replace(world, release=release)
    model = nn.Linear(4, 4)

    def train() -> None:
        sync.backward(sync.module(torch.ones(2, 4)).sum(), last=True)

    if steps:
        sync = MAKE[way](model, world)
        for _ in range(steps):
            train()
    if world.rank > 0:
        with suppress(dist.DistError):
            world.store.wait(["rank 0 is free"], timedelta(seconds=10))
        world.store.set("rank 1 left", "")
        os._exit(0)
    has_ended = threading.Event()
    release.at_end(has_ended.set)
    threading.Timer(0.3, release.end).start()
    with pytest.raises(Exception, match="generation was over"):
        train() if steps else MAKE[way](model, world)
    is_connected = not world.store.check(["rank 1 left"])
    world.store.set("rank 0 is free", "")
    return has_ended.wait(60), is_connected


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        pytest.param("stock", 0, id="comparing shapes when DDP is made"),
        pytest.param("hooked", 1, id="agreeing on buckets in the second step"),
        pytest.param("stock", 2, id="summing gradients itself"),
    ],
)
def test_a_rank_waiting_in_ddp_is_released_when_its_generation_ends(way: str, steps: int, tmp_path: Path) -> None:
    assert run_ranks(partial(train_and_lose_peer, way, steps), 2, tmp_path, dying=[1])[0] == (True, True)

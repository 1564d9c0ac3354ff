"""Making replicas equal, and knowing that they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.waiting import await_work
from shoal.sync.world import World


def all_agree(world: World, digest: str) -> bool:
    """Whether every rank holds the same digest; 32 bytes a rank instead of the state itself."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8).to(world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return all(torch.equal(theirs, mine) for theirs in everyone)


def copy_from(world: World, source: int, tensors: Iterable[Tensor]) -> None:
    """Overwrites every rank's tensors with those of `source`."""
    for tensor in tensors:
        await_work(dist.broadcast(tensor, src=source, group=world.group, async_op=True), world.release)


def tell_all(world: World, source: int, numbers: list[int]) -> list[int]:
    """A few integers from one rank to all."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    await_work(dist.broadcast(tensor, src=source, group=world.group, async_op=True), world.release)
    return [int(number) for number in tensor.cpu()]


def gather(world: World, numbers: list[int]) -> list[list[int]]:
    """A few integers of every rank, for all."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return [[int(number) for number in theirs.cpu()] for theirs in everyone]

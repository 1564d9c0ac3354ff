"""Formats that gloo adds up by itself: fp32 as it is, and fp16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.sync.wires.bucket import Bucket, Stateless, future_of
from shoal.sync.wires.desks import Desks
from shoal.sync.wires.kernels import load_kernels
from shoal.sync.world import World

_FP16_SCALE = 256.0


class Fp32(Stateless):
    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        work = dist.all_reduce(bucket.flat, group=self._world.group, async_op=True)
        return future_of(work).then(lambda done: done.value()[0])


class Fp16(Stateless):
    """Half the bytes and 11 bits of precision. All ranks get the same bits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._halves = Desks(lambda bucket: torch.empty_like(bucket.flat, dtype=torch.float16))
        load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        half = self._halves.of(bucket)
        to_half(bucket.flat, half)
        work = dist.all_reduce(half, group=self._world.group, async_op=True)
        return future_of(work).then(lambda done: from_half(done.value()[0], bucket.flat))


def to_half(full: Tensor, half: Tensor) -> Tensor:
    """Mean gradients are small: unscaled, most lie below 6e-5, where fp16 loses bit after bit. A power of two moves
    them up without rounding; a sum over 255 overflows, and the step is refused for its infinite norm."""
    kernels = load_kernels()
    if kernels is not None and kernels.has_halves and full.device.type == "cpu":
        kernels.to_half(full, half, _FP16_SCALE)
        return half
    return half.copy_(full.mul(_FP16_SCALE))


def from_half(half: Tensor, full: Tensor) -> Tensor:
    kernels = load_kernels()
    if kernels is not None and kernels.has_halves and full.device.type == "cpu":
        kernels.from_half(half, full, 1 / _FP16_SCALE)
        return full
    return full.copy_(half).mul_(1 / _FP16_SCALE)

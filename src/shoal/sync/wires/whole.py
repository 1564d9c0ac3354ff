"""Formats that gloo adds up by itself: fp32 as it is, and fp16."""

from __future__ import annotations

import platform

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.sync.wires.bucket import Bucket, Stateless, future_of
from shoal.sync.wires.desks import Desks
from shoal.sync.wires.kernels import load_kernels
from shoal.sync.world import World

_FP16_SCALE = 256.0
# Measured on an ARM core, nanoseconds a number to fp16 and back: torch 7.5 and 2.1, numpy 1.0 and 0.5, our kernel 0.24
# and 0.26, which is what a copy takes.
TORCH_GOES_ONE_BY_ONE = platform.machine() == "aarch64"


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
        if TORCH_GOES_ONE_BY_ONE:
            load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        half = self._halves.of(bucket)
        to_half(bucket.flat, half)
        work = dist.all_reduce(half, group=self._world.group, async_op=True)
        return future_of(work).then(lambda done: from_half(done.value()[0], bucket.flat))


def to_half(full: Tensor, half: Tensor) -> Tensor:
    """Mean gradients are small: unscaled, most lie below 6e-5, where fp16 loses bit after bit. A power of two moves
    them up without rounding; a sum over 255 overflows, and the step is refused for its infinite norm."""
    if full.device.type != "cpu" or not TORCH_GOES_ONE_BY_ONE:
        return half.copy_(full.mul(_FP16_SCALE))
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.to_half(full, half, _FP16_SCALE)
    else:
        _multiply(full, _FP16_SCALE, half)
    return half


def from_half(half: Tensor, full: Tensor) -> Tensor:
    if full.device.type != "cpu" or not TORCH_GOES_ONE_BY_ONE:
        return full.copy_(half).mul_(1 / _FP16_SCALE)
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.from_half(half, full, 1 / _FP16_SCALE)
    else:
        _multiply(half, 1 / _FP16_SCALE, full)
    return full


def _multiply(numbers: Tensor, factor: float, into: Tensor) -> None:
    """In fp32, whatever comes in and goes out."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(numbers.numpy(), np.float32(factor), out=into.numpy(), dtype=np.float32, casting="same_kind")

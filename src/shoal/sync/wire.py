"""Wire formats: how a bucket of gradients is summed over the world.

Each takes a bucket and returns a future of the same tensor holding the *sum*; nobody divides by the world size, because
the loss was already divided by the global token count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.sync.world import World

_FP16_SCALE = 256.0

Wire = Callable[[World, Tensor], "Future[Tensor]"]


def fp32_sum(world: World, bucket: Tensor) -> Future[Tensor]:
    return _future(dist.all_reduce(bucket, group=world.group, async_op=True)).then(lambda done: done.value()[0])


def fp16_sum(world: World, bucket: Tensor) -> Future[Tensor]:
    """Half the bytes and 11 bits of precision. All ranks get the same bits."""

    def widen(done: Future[list[Tensor]]) -> Tensor:
        return from_half(bucket, done.value()[0])

    return _future(dist.all_reduce(to_half(bucket), group=world.group, async_op=True)).then(widen)


def to_half(bucket: Tensor) -> Tensor:
    """Mean gradients are small: unscaled, most lie below 6e-5, where fp16 loses bit after bit. A power of two moves
    them up without rounding; a sum over 255 overflows, and the step is refused for its infinite norm."""
    return bucket.mul(_FP16_SCALE).to(torch.float16)


def from_half(bucket: Tensor, half: Tensor) -> Tensor:
    return bucket.copy_(half).mul_(1 / _FP16_SCALE)


WIRES: dict[str, Wire] = {"fp32": fp32_sum, "fp16": fp16_sum}


def _future(work: dist.Work | None) -> Future[list[Tensor]]:
    assert work is not None  # noqa: S101 - only a rank outside the group gets None
    return work.get_future()

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

Wire = Callable[[World, Tensor], "Future[Tensor]"]


def fp32_sum(world: World, bucket: Tensor) -> Future[Tensor]:
    return _future(dist.all_reduce(bucket, group=world.group, async_op=True)).then(lambda done: done.value()[0])


def fp16_sum(world: World, bucket: Tensor) -> Future[Tensor]:
    """Half the bytes; 11 bits of precision, and what is below 6e-8 is lost. All ranks get the same bits."""
    half = bucket.to(torch.float16)

    def widen(done: Future[list[Tensor]]) -> Tensor:
        return bucket.copy_(done.value()[0])

    return _future(dist.all_reduce(half, group=world.group, async_op=True)).then(widen)


WIRES: dict[str, Wire] = {"fp32": fp32_sum, "fp16": fp16_sum}


def _future(work: dist.Work | None) -> Future[list[Tensor]]:
    assert work is not None  # noqa: S101 - only a rank outside the group gets None
    return work.get_future()

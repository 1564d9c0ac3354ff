"""Gradients without overlap: backward, barrier, all-reduce, each timed alone. Slower, and clear."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.sync.shared.choose import GLOO, Inside
from shoal.sync.times import CommTimes
from shoal.sync.wires import Bucket, Wire
from shoal.sync.wires.bucket import WithWire
from shoal.sync.world import World, barrier


class BarrierSync(WithWire):
    inside: Inside = GLOO
    extra_bytes = 0

    def __init__(self, model: nn.Module, world: World, wire: Wire, bucket_mb: float) -> None:
        self.module = model
        self._world = world
        self._wire = wire
        self._bucket_bytes = int(bucket_mb * 2**20)

    def loss_scale(self, global_tokens: int) -> float:
        return 1.0 / global_tokens

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> CommTimes:
        ready_at = time.perf_counter()
        barrier(self._world)
        together_at = time.perf_counter()
        for index, parameters in enumerate(self._buckets()):
            self._sum(index, parameters)
        now = time.perf_counter()
        return CommTimes(ready_at, now - ready_at, now - together_at, wait_s=together_at - ready_at)

    def close(self) -> None:
        pass

    def _buckets(self) -> list[list[Tensor]]:
        """In the order in which backward made them, as DDP does, so that both variants send the same messages."""
        buckets: list[list[Tensor]] = [[]]
        filled = 0
        for parameter in reversed(list(self.module.parameters())):
            if parameter.grad is None:
                continue
            if filled + parameter.nbytes > self._bucket_bytes and buckets[-1]:
                buckets.append([])
                filled = 0
            buckets[-1].append(parameter)
            filled += parameter.nbytes
        return buckets

    def _sum(self, index: int, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        summed = self._wire(Bucket(index, flat, parameters)).wait()
        for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

"""What a step sums over all ranks beside the gradients: how many terms its loss has, and the model's buffers.

Samples may count differently: a batch of texts has as many terms as it has tokens that are not padding. The gradient is
exact when the sum of all losses is divided by the number of all terms, which only the sum over the ranks gives.

Buffers, such as the running means of BatchNorm, are updated by every forward pass on this rank's samples alone. All
ranks take the average, weighted by their parts of the batch, so that replicas stay equal to the bit. DDP takes those of
rank 0 instead, which forgets what the other ranks have seen.

Both travel in one small all-reduce that starts before the last backward of a step, which hides it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.interruptible import await_work
from shoal.sync.world import World

# A float has 24 bits: a count is sent as two digits of this base, which stay exact when they are summed over ranks.
_BASE = 1 << 16


class StepTotals:
    """The sums of one step in one world. A world of one rank exchanges nothing."""

    def __init__(self, world: World, buffers: Mapping[str, Tensor], weight: float) -> None:
        self._world = world
        self.weight = weight  # This rank's part of the global batch.
        self._buffers = list(buffers.values())
        self._before: list[Tensor] = []
        self.common = [buffer.clone() for buffer in self._buffers]  # When all ranks last had the same.
        self._count = 0
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the buffers as they are before the step."""
        self._before = [buffer.clone() for buffer in self._buffers]
        self._flat = self._work = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back: the step is done again."""
        for buffer, before in zip(self._buffers, self._before, strict=False):
            buffer.copy_(before)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the buffers as they are for those that all ranks have in common."""
        self.common = [buffer.clone() for buffer in self._buffers]

    def average_buffers(self) -> None:
        """Make the buffers of all ranks equal, after an exchange of parameters."""
        if self._buffers:
            self.start(0)
            self.finish()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Return to the buffers that all ranks last had in common."""
        for buffer, common in zip(self._buffers, self.common, strict=True):
            buffer.copy_(common)

    @torch.no_grad()
    def start(self, count: int) -> None:
        """Send this rank's part, after the last forward of a step."""
        self._count = count
        if self._world.size == 1:
            return
        device = self._world.control_device
        parts = [torch.tensor([count // _BASE, count % _BASE], dtype=torch.float32, device=device)]
        parts += [(buffer.flatten().float() * self.weight).to(device) for buffer in self._buffers]
        self._flat = torch.cat(parts)
        self._work = dist.all_reduce(self._flat, group=self._world.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> int:
        """Write the averages into the buffers; return the number of terms of all ranks."""
        if self._flat is None or self._work is None:
            if self._world.size == 1:
                self.adopt()
            # Otherwise nothing was started: replicas train alone, and what they have in common stays.
            return self._count
        await_work(self._work, self._world.release)
        (high, low), averages = self._flat[:2].tolist(), self._flat[2:]
        for buffer, part in zip(self._buffers, averages.split([b.numel() for b in self._buffers]), strict=True):
            average = part.view_as(buffer)
            buffer.copy_(average if buffer.is_floating_point() else average.round())
        self.adopt()
        self._flat = self._work = None
        return int(high) * _BASE + int(low)

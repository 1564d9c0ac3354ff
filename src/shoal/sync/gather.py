"""The rows of all ranks' micro-batches as one tensor, with gradients: what a contrastive loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.sync.interruptible import await_work
from shoal.sync.world import World


class GatheredRows(NamedTuple):
    """The rows of all ranks, in the order of the ranks, and which of them are this rank's."""

    rows: Tensor
    own: slice


def gather_rows(world: World, tensor: Tensor, counts: Sequence[int], divided_by: int = 1) -> GatheredRows:
    """Return the rows of all ranks, of which `counts` has the number; all ranks call it.

    The gradient of a row is the sum of what all ranks' losses say about it. A rank's loss may be `divided_by` a number
    of its own: then the gradient is divided by that of the row's rank.
    """
    begin = sum(counts[: world.rank])
    own = slice(begin, begin + counts[world.rank])
    if world.size == 1:
        return GatheredRows(tensor, own)
    rows: Tensor = _GatherRows.apply(tensor, world, tuple(counts), own, divided_by)  # type: ignore[no-untyped-call]
    return GatheredRows(rows, own)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World, counts: tuple[int, ...], own: slice, divided_by: int) -> Tensor:
        ctx.world, ctx.own, ctx.divided_by = world, own, divided_by
        # gloo gathers tensors of one size: shorter parts are padded.
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]), device=world.control_device)
        padded[: len(tensor)] = tensor.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        await_work(dist.all_gather(parts, padded, group=world.group, async_op=True), world.release)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).to(tensor.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        world: World = ctx.world
        total = (gradient * ctx.divided_by).to(world.control_device).contiguous()
        await_work(dist.all_reduce(total, group=world.group, async_op=True), world.release)
        return (total[ctx.own] / ctx.divided_by).to(gradient.device), None, None, None, None

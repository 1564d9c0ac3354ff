"""The public API: what a training script of your own needs, and nothing it has to be rewritten for.

These names lean on torch's default process group, so they mix freely with plain `torch.distributed` calls.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.control.rank_env import Placement
from shoal.errors import UsageError
from shoal.sync import world as worlds
from shoal.sync.world import World


def init_distributed(backend: str | None = None, device: str = "auto", timeout_s: float = 60.0) -> World:
    """Joins the world that the launcher (shoal, torchrun) describes; without a launcher, a world of one.

    The backend follows the device (gloo on CPU, NCCL on CUDA) unless given. Unpacks: `rank, size = init_distributed()`.
    """
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(
            f"there is no backend {backend!r} here", fix="use 'gloo', 'nccl', or None to follow the device"
        )
    wanted = {"gloo": "cpu", "nccl": "cuda"}.get(backend or "", device) if device == "auto" else device
    placement = Placement.from_env(os.environ)
    return worlds.join(placement, worlds.choose_device(wanted, placement), backend=backend, timeout_s=timeout_s)


def wrap_for_ddp(model: nn.Module) -> DistributedDataParallel:
    """`DistributedDataParallel` on the default group; a world of one is wrapped too, so code has one path."""
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def is_main_process() -> bool:
    """True on rank 0, and in a process that belongs to no world."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return Placement.from_env(os.environ).rank == 0


def barrier() -> None:
    """Waits for every rank; does nothing outside a world."""
    if dist.is_initialized():
        dist.barrier()


def cleanup() -> None:
    """Leaves the world; safe to call twice, when none was joined, and in a `finally` after an error."""
    if not dist.is_initialized():
        return
    if sys.exc_info()[0] is None:
        # With an error in flight the peers may never come here, and waiting for them would hide it for a minute.
        dist.barrier()
    dist.destroy_process_group()

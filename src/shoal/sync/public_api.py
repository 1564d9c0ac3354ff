"""The public API for your own training script: join the ranks, wrap the model, wait, leave.

These functions use torch's default process group, so they can be mixed with plain `torch.distributed` calls.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.defaults import SYNC_TIMEOUT_S
from shoal.control.rank_env import Placement
from shoal.errors import UsageError
from shoal.sync.world import World, choose_device, join_world


def init_distributed(backend: str | None = None, device: str = "auto", timeout_s: float = SYNC_TIMEOUT_S) -> World:
    """Join the process group that the launcher (shoal, torchrun) describes; without a launcher, form a group of one.

    The backend follows the device (gloo on CPU, NCCL on CUDA) unless given. Unpacks: `rank, size = init_distributed()`.
    """
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(
            f"there is no backend {backend!r} here", fix="use 'gloo', 'nccl', or None to follow the device"
        )
    device_name = {"gloo": "cpu", "nccl": "cuda"}.get(backend or "", device) if device == "auto" else device
    placement = Placement.from_env(os.environ)
    chosen = choose_device(device_name, placement)
    name = backend or ("nccl" if chosen.type == "cuda" else "gloo")
    return join_world(placement, chosen, backend=name, timeout_s=timeout_s)


def wrap_for_ddp(model: nn.Module) -> DistributedDataParallel:
    """Wrap the model in `DistributedDataParallel` with its defaults on the default group, also for a single rank."""
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def is_main_process() -> bool:
    """Return True on rank 0, and in a process without a process group."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return Placement.from_env(os.environ).rank == 0


def barrier() -> None:
    """Wait for every rank; do nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def cleanup() -> None:
    """Leave the process group. Safe to call twice, without a group, and in a `finally` after an error."""
    if not dist.is_initialized():
        return
    if sys.exc_info()[0] is None:
        # After an error the peers may never reach this barrier, and the wait would delay the error by a minute.
        dist.barrier()
    dist.destroy_process_group()

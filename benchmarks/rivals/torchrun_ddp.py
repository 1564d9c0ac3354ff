"""A rank under elastic torchrun, as PyTorch's tutorial on fault-tolerant training writes it: resume from a snapshot.

The snapshot lies in a folder that all nodes share, which spares torchrun the question whose is the newest.
"""

from __future__ import annotations

import argparse
import secrets
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from rivals.journal import Journal
from rivals.small_gpt import backward, batch, make_model, make_optimizer
from rivals.workload import CHECKPOINT_EVERY

_START_S = 60


def load(path: Path, model: nn.Module, optimizer: AdamW) -> int:
    """The step it goes on after; 0 without a snapshot."""
    if not path.exists():
        return 0
    snapshot = torch.load(path, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["step"])


def save(path: Path, model: nn.Module, optimizer: AdamW, step: int) -> None:
    half = path.with_suffix(".half")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, half)
    half.replace(path)


def agree_on_a_name() -> str:
    """For this group and no other; torchrun itself names none, and may keep its store's port over a restart."""
    names = [secrets.token_hex(4)]
    dist.broadcast_object_list(names)
    return names[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--timeout-s", type=float, help="of a collective; unset it is torch's default, 30 minutes")
    chosen = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_START_S) if chosen.timeout_s else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = agree_on_a_name()
    if chosen.timeout_s:
        # Only once all are there, as torchtitan does it: ranks that are still importing torch come late, not never.
        _set_pg_timeout(timedelta(seconds=chosen.timeout_s), dist.group.WORLD)
    model = make_model()
    optimizer = make_optimizer(model)
    snapshot = chosen.folder / "snapshot.pt"
    step = load(snapshot, model, optimizer)
    ddp = DistributedDataParallel(model)
    journal = Journal(chosen.folder / "steps", chosen.name)
    while True:
        step += 1
        backward(ddp, batch(step, rank, world))
        optimizer.step()
        optimizer.zero_grad()
        journal.done(step, world, group)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(snapshot, model, optimizer, step)


if __name__ == "__main__":
    main()

"""The training of `images_task` with torchft: its manager, wrapped model and optimizer, and its sampler.

Started once for each replica group, beside a lighthouse. There are wheels for x86-64 only.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from rivals.images_task import GLOBAL_BATCH, STEPS, make_images, make_model

group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
model = make_model()
inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(inner, T_max=STEPS)


def save() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": inner.state_dict(), "scheduler": scheduler.state_dict()}


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=save,
    replica_id=f"images_{group}",
    timeout=timedelta(seconds=10),
)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
images = TensorDataset(*make_images())
sampler = DistributedSampler(images, replica_group_id=group, num_replica_groups=groups, group_rank=0, num_replicas=1)
loader = DataLoader(images, batch_size=GLOBAL_BATCH // groups, sampler=sampler, drop_last=True)
while manager.current_step() < STEPS:
    for inputs, labels in loader:
        step = manager.current_step()
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() > step:
            scheduler.step()
        print(f"step {manager.current_step()}: loss {loss.item():.3f}", flush=True)
        if manager.current_step() >= STEPS:
            break

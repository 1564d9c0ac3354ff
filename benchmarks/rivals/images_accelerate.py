"""The training of `images_task` with Accelerate and its checkpoints: without them a lost rank loses everything."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-untyped]
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from rivals.images_task import GLOBAL_BATCH, STEPS, make_images, make_model

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
loader = DataLoader(TensorDataset(*make_images()), batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
step = 0
checkpoint = Path(os.environ["CHECKPOINT"])
if checkpoint.exists():
    accelerator.load_state(str(checkpoint))
    step = scheduler.scheduler.last_epoch
while step < STEPS:
    for inputs, labels in accelerator.skip_first_batches(loader, step % len(loader)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step % 20 == 0:
            accelerator.save_state(str(checkpoint))
        if step == STEPS:
            break
accelerator.end_training()

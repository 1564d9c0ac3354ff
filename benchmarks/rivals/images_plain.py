"""The training of `images_task` in one process: what a user has before."""

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from rivals.images_task import GLOBAL_BATCH, STEPS, make_images, make_model

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
loader = DataLoader(TensorDataset(*make_images()), batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
step = 0
while step < STEPS:
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step == STEPS:
            break

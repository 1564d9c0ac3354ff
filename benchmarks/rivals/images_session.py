"""The training of `images_task` with `shoal.Session`."""

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import shoal
from rivals.images_task import GLOBAL_BATCH, STEPS, make_images, make_model

session = shoal.Session(steps=STEPS, global_batch=GLOBAL_BATCH, checkpoint_every=20)
model = make_model().to(session.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
session.attach(model, optimizer, scheduler)
images = make_images()
for step in session:
    with step:
        for inputs, labels in step.batches(images):
            loss = F.cross_entropy(model(inputs), labels, reduction="sum")
            step.backward(loss)
        step.update(clip=1.0)
        print(f"step {step.number}: loss {loss.item() / len(labels):.3f}", flush=True)

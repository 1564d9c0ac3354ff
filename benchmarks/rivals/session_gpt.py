"""The rivals' training as a user's own loop with `shoal.Session`."""

from __future__ import annotations

import torch

import shoal
from rivals.small_gpt import make_model, make_optimizer
from rivals.workload import GLOBAL_BATCH, MODEL

session = shoal.Session(steps=100_000, global_batch=GLOBAL_BATCH, checkpoint_every=20)
model = make_model()
optimizer = make_optimizer(model)
session.attach(model, optimizer)
tokens = torch.randint(MODEL.vocab_size, (2_000, MODEL.seq_len + 1), generator=torch.Generator().manual_seed(1))
for step in session:
    with step:
        for rows in step.batches(tokens):
            step.backward(model(rows[:, :-1], rows[:, 1:]) / MODEL.seq_len)
        step.update(clip=1.0)

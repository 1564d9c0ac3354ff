"""A small GAN as in PyTorch's dcgan example: `gan.py RESULT [STEPS]`.

Rank 1 of the first launch kills itself between the update of the judge and that of the maker.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shoal

result, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16
killed = result.with_suffix(".killed")
torch.manual_seed(0)
judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.5, 0.999))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.999))
data = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
noise = torch.randn(96, 3, generator=torch.Generator().manual_seed(2))

session = shoal.Session(steps=steps, global_batch=12, settings={"train.pin": "off"})
session.attach(judge, maker, judge_optimizer, maker_optimizer)
losses = []
for step in session:
    with step:
        with step.part(judge_optimizer):
            for real, seeds in step.batches((data, noise)):
                fake = maker(seeds)
                real_loss = F.binary_cross_entropy_with_logits(judge(real), torch.ones(len(real), 1), reduction="sum")
                fake_loss = F.binary_cross_entropy_with_logits(
                    judge(fake.detach()), torch.zeros(len(real), 1), reduction="sum"
                )
                step.backward(real_loss + fake_loss)
        if step.number == 6 and session.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for real, seeds in step.batches((data, noise)):
            fooled = F.binary_cross_entropy_with_logits(judge(maker(seeds)), torch.ones(len(real), 1), reduction="sum")
            step.backward(fooled)
        done = step.update()
    if session.step == step.number:
        losses.append(done.loss)
if session.is_main:
    weights = torch.cat([p.detach().flatten() for model in (judge, maker) for p in model.parameters()])
    result.write_text(json.dumps({"losses": losses, "weights": weights.tolist()}))

"""Train on samples drawn with replacement: `drawn.py weighted|equal RESULT`. At step 6 rank 1 kills itself once."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

way, result = sys.argv[1], Path(sys.argv[2])
killed = result.with_suffix(".killed")
torch.manual_seed(0)
session = shoal.Session(steps=12, global_batch=12, settings={"train.pin": "off"})
model = nn.Linear(8, 2)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.randn(40, 8)
drawn = shoal.weighted(data, torch.arange(40) % 4) if way == "weighted" else shoal.with_replacement(data)

for step in session:
    with step:
        for inputs in step.batches(drawn):
            if step.number == 6 and session.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(inputs).square().sum())
        step.update()
if session.is_main:
    result.write_text(json.dumps(model.weight.flatten().tolist()))

"""Follow a training: `followed.py LINES [die]`. With `die` the first main rank kills itself in step 6."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

lines = Path(sys.argv[1])
killed = lines.with_suffix(".killed")
torch.manual_seed(0)
session = shoal.Session(steps=16, global_batch=12, settings={"train.pin": "off"})
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.attach(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4))
session.on_step(shoal.loggers.TensorBoard(lines.with_suffix(".board")))
data = torch.randn(96, 8)


@session.on_step
def follow(record: shoal.StepRecord) -> None:
    with lines.open("a") as file:
        file.write(json.dumps({"step": record.step, "pid": os.getpid(), **record.scalars()}) + "\n")


@session.every(4)
def check() -> None:
    session.log(checked=float(session.step))


for step in session:
    with step:
        for inputs in step.batches(data):
            if "die" in sys.argv and step.number == 6 and session.is_main and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(inputs).square().sum())
        step.update(mine=step.number / 2)

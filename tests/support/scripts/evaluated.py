"""Evaluate after every fourth step: `evaluated.py evaluate|best RESULTS`.

After step 8 rank 1 of the first launch kills itself, in the middle of the evaluation or between it and `session.best`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

way, results = sys.argv[1], Path(sys.argv[2])
killed = results.with_suffix(".killed")
torch.manual_seed(0)
session = shoal.Session(steps=12, global_batch=12, settings={"train.pin": "off"})
model = nn.Linear(8, 2)
numbers = shoal.Numbers(seen=0)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), numbers)
data, tests = torch.randn(96, 8), torch.arange(53.0)


def die_once(now: str) -> None:
    if now == way and session.step == 8 and session.rank == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def measure(rows: torch.Tensor) -> torch.Tensor:
    die_once("evaluate")
    return rows.sum()


@session.every(4)
def evaluate() -> None:
    value = session.evaluate(tests, measure, batch=4)
    die_once("best")
    session.best(value)
    line = {"step": session.step, "rank": session.rank, "value": value, "seen": numbers.seen}
    line["expected"] = str(tests.mean().item())
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


for step in session:
    with step:
        for inputs in step.batches(data):
            step.backward(model(inputs).square().sum())
        step.update(after=lambda: numbers.add(seen=12))

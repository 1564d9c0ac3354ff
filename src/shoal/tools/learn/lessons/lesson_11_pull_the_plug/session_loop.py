"""The same loop with shoal.Session.

shoal run --on lab:2 session_loop.py STEPS
"""

import sys
import time

import torch
from torch import nn

import shoal

WIDTH, BATCH, PAUSE_S = 64, 16, 0.1


def main() -> None:
    session = shoal.Session(steps=int(sys.argv[1]), global_batch=BATCH)
    torch.manual_seed(35_000)
    model = nn.Linear(WIDTH, WIDTH).to(session.device)
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    dataset = torch.utils.data.TensorDataset(torch.randn(512, WIDTH))
    for step in session:
        time.sleep(PAUSE_S)
        with step:
            for (rows,) in step.batches(dataset):
                step.backward(model(rows).square().mean(dim=1).sum())
            step.update()


if __name__ == "__main__":
    main()

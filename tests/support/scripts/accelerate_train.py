"""HF Accelerate, as in its examples: a small regression, its batches split over the processes."""

import argparse
import hashlib
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true", help="train on the CPU")
arguments = parser.parse_args()

accelerator = Accelerator(cpu=arguments.cpu, dataloader_config=DataLoaderConfiguration(split_batches=True))

torch.manual_seed(0)
inputs = torch.linspace(-1, 1, 48).reshape(24, 2)
targets = inputs.prod(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

seen = 0
for _ in range(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen += len(x)

with torch.no_grad():
    final_loss = mse_loss(model(inputs), targets).item()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(weights).hexdigest()[:16]
rank, world_size = accelerator.process_index, accelerator.num_processes
print(f"rank {rank} of {world_size} on {os.uname().nodename}: samples {seen} loss {final_loss:.6f} weights {digest}")
accelerator.end_training()

"""Lightning Fabric, as in its guide: a small regression, its batches split over the processes."""

import argparse
import hashlib
import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1, help="processes on each machine")
parser.add_argument("--num-nodes", type=int, default=1, help="machines")
arguments = parser.parse_args()

fabric = Fabric(accelerator="cpu", devices=arguments.devices, num_nodes=arguments.num_nodes)
fabric.launch()

torch.manual_seed(0)
inputs = torch.linspace(-1, 1, 48).reshape(24, 2)
targets = inputs.prod(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12 // fabric.world_size)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

seen = 0
for _ in range(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        seen += len(x)

with torch.no_grad():
    final_loss = mse_loss(model(inputs), targets).item()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(weights).hexdigest()[:16]
rank, world_size = fabric.global_rank, fabric.world_size
print(f"rank {rank} of {world_size} on {os.uname().nodename}: samples {seen} loss {final_loss:.6f} weights {digest}")

"""Plain DDP whose backward runs in the closure of `optimizer.step(closure)`, as in Lightning's Trainer.

`closure_ddp.py sgd` calls the closure once a step, `closure_ddp.py lbfgs` several times.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
parameters = list(model.parameters())
optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
if sys.argv[1] == "lbfgs":
    optimizer = torch.optim.LBFGS(parameters, max_iter=4)
x = torch.linspace(-1, 1, 48).reshape(24, 2)[dist.get_rank() :: 2]
y = x.prod(dim=1, keepdim=True)
calls = 0


def closure() -> torch.Tensor:
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(10):
    optimizer.step(closure)
print(f"closure called {calls} times")
dist.destroy_process_group()

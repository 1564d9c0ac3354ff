"""The loss of each rank is its own; after a step the weights are equal.

shoal run --on local:2 examples/myths/own_loss.py
"""

import hashlib

import torch
from torch.nn import functional as F

from shoal import cleanup, init_distributed, wrap_for_ddp

world = init_distributed()
torch.manual_seed(1)  # The same weights on every rank.
model = wrap_for_ddp(torch.nn.Linear(16, 1).to(world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(2 + world.rank)  # Samples of its own.
for step in range(1, 4):
    inputs = torch.randn(64, 16, device=world.device)
    loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:8]
    print(f"step {step}: own loss {loss.item():.4f}, weights {digest}", flush=True)
cleanup()

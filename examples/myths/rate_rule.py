"""A batch 16 times as large, over the same samples: which learning rate, with SGD and with AdamW?

python examples/myths/rate_rule.py
"""

import torch
from torch.nn import functional as F

from shoal import make_shard

torch.set_num_threads(1)
LENGTH, BATCH, STEPS, FACTOR = 24, 16, 512, 16
rows = torch.tensor([[ord(c) % 128 for c in text[: LENGTH + 1].ljust(LENGTH + 1)] for text in make_shard(0, 1)])


def train(optimizer: type[torch.optim.SGD] | type[torch.optim.AdamW], lr: float, batch: int, steps: int) -> float:
    """Return the mean loss of the last eighth of the training, after a warm-up of one eighth."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Embedding(128, 64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 128)
    )
    update = optimizer(net.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for group in update.param_groups:
            group["lr"] = lr * min(1.0, 8 * (step + 1) / steps)
        part = rows[torch.arange(step * batch, (step + 1) * batch) % len(rows)]
        loss = F.cross_entropy(net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return sum(losses[-steps // 8 :]) / (steps // 8)


for optimizer, lr in ((torch.optim.SGD, 0.03), (torch.optim.AdamW, 0.01), (torch.optim.AdamW, 0.03)):
    rules = {"as it was": 1.0, "square root": FACTOR**0.5, "linear": float(FACTOR)}
    ends = {name: train(optimizer, lr * factor, BATCH * FACTOR, STEPS // FACTOR) for name, factor in rules.items()}
    text = ", ".join(f"{name} {loss:.3f}" for name, loss in ends.items())
    print(f"{optimizer.__name__} at {lr:g}: loss {train(optimizer, lr, BATCH, STEPS):.3f}; batch x{FACTOR}: {text}")

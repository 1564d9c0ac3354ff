"""The training that all rivals do: a GPT of shoal's own with 1.3 million parameters, on made-up tokens.

What the tokens are changes nothing about a recovery; their number is the same for everybody.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rivals.workload import GLOBAL_BATCH, MODEL
from shoal.model.gpt import GPT


def make_model() -> GPT:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return GPT(MODEL)


def make_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=True)


def batch(step: int, rank: int, world: int) -> Tensor:
    """This rank's share, inputs and targets in one row."""
    generator = torch.Generator().manual_seed(step * 1_000 + rank)
    shape = (GLOBAL_BATCH // world, MODEL.seq_len + 1)
    return torch.randint(MODEL.vocab_size, shape, generator=generator)


def backward(model: nn.Module, rows: Tensor) -> None:
    """The model sums the loss over tokens; each rank takes the mean of its own, and DDP the mean of those."""
    loss = model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
    loss.backward()

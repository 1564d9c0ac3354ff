"""Clipping by the norm of all gradients together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# What torch adds to a norm before it divides by it.
_GUARD = 1e-6


def clip(parameters: Iterable[Tensor], most: float) -> float:
    """The norm before clipping; the same bits as `clip_grad_norm_`.

    That one multiplies gradients which are small enough by one: 1 GB read and written for GPT-2 124M.
    """
    having = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([each.grad for each in having if each.grad is not None])
    norm = float(total)
    if not norm + _GUARD < most:
        torch.nn.utils.clip_grads_with_norm_(having, most, total)
    return norm

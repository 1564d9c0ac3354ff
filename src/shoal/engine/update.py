"""The end of a step: the norm of the gradients, clipping, and the optimizers' update.

Whether a step is applied depends on its loss and its norm. When the processor knows both, a GPU has nothing left to do:
if only then the update is queued, the GPU waits for the processor, 5.7 ms in a step of 65 ms (H200). torch's
fused optimizers can decide on the GPU instead, as they do for a grad scaler: `update_if_finite` queues the update, and
`StepNumbers` reads loss and norm while the GPU is busy with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

# What torch adds to a norm before it divides by it.
_NORM_EPSILON = 1e-6


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together; on a GPU without waiting for it."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_gradients(parameters: Iterable[Tensor], norm: float, most: float) -> None:
    """Clip gradients of this norm to at most `most`, with the same bits as `clip_grad_norm_`.

    torch's function multiplies gradients that are small enough by one: 1 GB read and written for GPT-2 124M.
    """
    if not norm + _NORM_EPSILON < most:
        with_gradient = [p for p in parameters if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(with_gradient, most, torch.tensor(norm, dtype=torch.float32))


def clip_divisor(norm: Tensor, most: float) -> Tensor:
    """Return what gradients of this norm are divided by to have at most the norm `most`."""
    return ((norm + _NORM_EPSILON) / most).clamp(min=1.0).float()


class StepNumbers:
    """The loss and the norm of a step, on their way from a GPU's queue to the processor."""

    def __init__(self, loss_sum: Tensor, norm: Tensor) -> None:
        # To the processor without blocking: torch takes pinned memory for it.
        self._values = torch.stack((loss_sum.to(norm.device), norm.double())).to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if norm.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> tuple[float, float]:
        """Wait for the numbers, and for nothing that was queued after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss_sum, norm = self._values.tolist()
        return loss_sum, norm


def can_decide_on_gpu(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether `update_if_finite` serves these optimizers: Adam, AdamW and SGD with `fused=True`."""
    return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)


def update_if_finite(optimizers: Sequence[Optimizer], loss_sum: Tensor, norm: Tensor, clip: float | None) -> None:
    """Queue the update with clipped gradients. It changes nothing if loss or norm turn out not to be finite."""
    is_bad = (~(loss_sum.to(norm.device).isfinite() & norm.isfinite())).float()
    scale = None if clip is None else clip_divisor(norm, clip)
    for optimizer in optimizers:
        # Attributes that torch's own grad scaler sets in the same way.
        guarded: Any = optimizer
        guarded.grad_scale, guarded.found_inf = scale, is_bad
        try:
            optimizer.step()
        finally:
            del guarded.grad_scale, guarded.found_inf


def step_unscaled(scaler: GradScaler, optimizers: Sequence[Optimizer], is_found: bool) -> None:
    """Take a step with gradients that this scaler has unscaled before; it may have forgotten that since."""
    for optimizer in optimizers:
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
    set_found_inf(scaler, optimizers, is_found)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def set_found_inf(scaler: GradScaler, optimizers: Sequence[Optimizer], is_found: bool) -> None:
    """Let a scaler take for found what the ranks have found together, not only in the part of this one."""
    for optimizer in optimizers:
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
            torch.device("cpu"): torch.tensor(float(is_found))
        }

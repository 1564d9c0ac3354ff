"""Activation checkpointing: a function keeps only its inputs, and is computed again when backward needs the rest.

As torch.utils.checkpoint does it, without reentrant backward. That one imports torch's compiler when it is first
called, which takes seconds and 90 MB, more than it saves in a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class _IsComplete(Exception):
    """All that backward needs of a function has been computed again."""


def recomputed(
    function: Callable[..., T],
    *inputs: Tensor | None,
    context: Callable[[], AbstractContextManager[object]],
    is_random: bool,
) -> T:
    """Return the result of a function. It runs inside `context()` now, and will again; `is_random`: it draws numbers
    from the generator of the inputs' device."""
    again = _Recomputation(function, inputs, context, is_random)
    with saved_tensors_hooks(again.note, again.take):
        return function(*inputs)


class _Recomputation:
    def __init__(
        self,
        function: Callable[..., object],
        inputs: tuple[Tensor | None, ...],
        context: Callable[[], AbstractContextManager[object]],
        is_random: bool,
    ) -> None:
        self._function, self._inputs, self._context = function, inputs, context
        device = next(x.device for x in inputs if x is not None)
        self._device = device if device.type != "cpu" else None
        self._random_state = _random_state(self._device) if is_random else None
        self._count = 0  # of the tensors that forward saved
        self._saved: dict[int, Tensor] = {}  # by their order

    def note(self, tensor: Tensor) -> int:
        """Remember only the place of a tensor that forward saves."""
        self._count += 1
        return self._count - 1

    def take(self, place: int) -> Tensor:
        """Return a saved tensor for backward."""
        if place not in self._saved:
            self._compute_again()
        return self._saved.pop(place)

    def _compute_again(self) -> None:
        def save(tensor: Tensor) -> int:
            place = len(self._saved)
            self._saved[place] = tensor.detach()
            if len(self._saved) == self._count:
                raise _IsComplete
            return place

        self._saved = {}
        # Of a graph of their own, which is dropped.
        inputs = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in self._inputs]
        devices = [] if self._device is None else [self._device]
        with torch.random.fork_rng(devices, enabled=self._random_state is not None):
            if self._random_state is not None:
                _set_random_state(self._random_state, self._device)
            with torch.enable_grad(), self._context(), saved_tensors_hooks(save, self._never):
                try:
                    self._function(*inputs)
                except _IsComplete:
                    return
        raise RuntimeError(f"the second forward saved {len(self._saved)} tensors, and the first one {self._count}")

    @staticmethod
    def _never(place: int) -> Tensor:
        raise RuntimeError("the graph of a second forward has no backward")


def _random_state(device: torch.device | None) -> Tensor:
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


def _set_random_state(state: Tensor, device: torch.device | None) -> None:
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)

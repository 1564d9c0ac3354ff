"""A piece of the model in outer steps: what is common to all replicas, and how far each has gone from it.

gap       weight · (common - own), summed over the world: the outer gradient
descend   the outer optimizer, SGD with Nesterov momentum as torch has it, moves what is common
adopt     own = mix · own + (1 - mix) · common
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import RunFailed


class NotFinite(RunFailed):
    """What replicas exchanged is no number, on every rank alike; what they have in common is untouched by it."""


@dataclass(frozen=True)
class Descent:
    """How far an outer step goes along the outer gradient. One all the way, without momentum, is the plain average."""

    lr: float = 1.0
    momentum: float = 0.0


AVERAGE = Descent()


class Piece:
    """Some parameters that travel together. Beside the model it holds one copy of them, and with momentum another."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], descent: Descent) -> None:
        self.index = index
        self._own = dict(parameters)
        self._common = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with_momentum = self._common if descent.momentum else {}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in with_momentum.items()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._own.values())

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self._common.values())

    @torch.no_grad()
    def gap(self, weight: float) -> Tensor:
        flat = next(iter(self._common.values())).new_empty(self.size)
        for part, common, own in zip(self._parts(flat), self._common.values(), self._own.values(), strict=True):
            torch.sub(common, own, out=part).mul_(weight)
        return flat

    def descend(self, gap: Tensor, descent: Descent) -> None:
        """`gap` is used up."""
        _refuse_nonfinite(gap)
        self._descend(list(self._parts(gap)), descent)

    @torch.no_grad()
    def put_by(self, gap: Tensor) -> None:
        """Keeps the summed gap where the replica's own parameters were, until the other pieces have theirs, too."""
        _refuse_nonfinite(gap)
        for own, part in zip(self._own.values(), self._parts(gap), strict=True):
            own.copy_(part)

    def descend_by_own(self, descent: Descent) -> None:
        self._descend([own.detach() for own in self._own.values()], descent)

    @torch.no_grad()
    def _descend(self, gaps: list[Tensor], descent: Descent) -> None:
        for (name, common), part in zip(self._common.items(), gaps, strict=True):
            if descent.momentum:
                momentum = self._momentum[name].mul_(descent.momentum).add_(part)
                part.add_(momentum, alpha=descent.momentum)
            common.add_(part, alpha=-descent.lr)

    @torch.no_grad()
    def adopt(self, mix: float = 0.0) -> None:
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            if mix:
                own.mul_(mix).add_(common, alpha=1 - mix)
            else:
                own.copy_(common)

    @torch.no_grad()
    def rewind(self) -> None:
        """What the model holds now is common."""
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            common.copy_(own)

    def swap(self) -> None:
        """The model gets what is common and this piece keeps what is the replica's own; twice is back again."""
        for name, own in self._own.items():
            own.data, self._common[name] = self._common[name], own.data

    def state(self) -> dict[str, Tensor]:
        return {f"outer.momentum.{name}": tensor for name, tensor in self._momentum.items()}

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        shapes = [tensor.shape for tensor in self._common.values()]
        for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True):
            yield part.view(shape)


def _refuse_nonfinite(gap: Tensor) -> None:
    """The same on every rank; it must not reach a checkpoint."""
    if not torch.isfinite(gap.sum()):
        raise NotFinite(
            "the parameters that replicas exchanged are not finite",
            why="one of them diverged, or a difference was too large for the wire format",
            fix="start a new run with a lower rate (--set train.lr=…) or with --wire fp32",
        )

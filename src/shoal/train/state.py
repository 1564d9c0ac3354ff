"""What a replica is: weights, the optimizer's moments, and how far it has come. One naming for files and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import CheckpointError
from shoal.sync.digests import flat_bytes

_MOMENTS = ("exp_avg", "exp_avg_sq")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Named after their parameters; empty before the first step."""
    return {
        f"optimizer.{moment}.{name}": state[moment]
        for name, parameter in model.named_parameters()
        if (state := optimizer.state.get(parameter))
        for moment in _MOMENTS
    }


def empty_moments(model: nn.Module) -> dict[str, Tensor]:
    """Room for moments that somebody else is about to send."""
    return {
        f"optimizer.{moment}.{name}": torch.empty_like(parameter)
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
    }


@torch.no_grad()
def fill(room: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in room.items():
        tensor.copy_(_take(tensors, name, tensor))


@torch.no_grad()
def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(_take(tensors, f"model.{name}", parameter))


def load_moments(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], step: int) -> None:
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            # The fused kernel wants its count as a tensor beside the parameter.
            "step": torch.tensor(float(step), device=parameter.device),
            **{
                moment: _take(tensors, f"optimizer.{moment}.{name}", parameter).to(parameter.device)
                for moment in _MOMENTS
            },
        }


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes; equal digests are equal replicas."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(flat_bytes(tensors[name]))
    return hasher.hexdigest()


def _take(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise CheckpointError(
            f"the checkpoint has {found} for {name}, the model wants {tuple(like.shape)} {like.dtype}",
            why="it was written by a run with another model",
            fix="resume with the configuration of the run that wrote it",
        )
    return tensor

"""The state of a training: what all ranks must have in common, as named tensors and plain values.

A training is a model, its optimizers and any other objects with `state_dict` and `load_state_dict`: schedulers, grad
scalers, averages of weights. Checkpoints, digests and copies to joining ranks see only a `StateTree`: tensors by name,
and everything else as JSON. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.engine.sharded_state import DividedOptimizers
from shoal.errors import CheckpointError, UsageError
from shoal.sync.replicas import flat_bytes

# Keys that mark what JSON cannot express. A user's dictionary with such a key is stored as a list of pairs.
_TENSOR, _PAIRS, _TUPLE = "$tensor", "$pairs", "$tuple"


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class StateTree:
    """A nested state, taken apart. Its tensors are those in use, not copies."""

    tensors: Mapping[str, Tensor]
    values: Any  # The nested state as JSON; where a tensor was, its name.

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def describe(self) -> dict[str, Any]:
        """Return everything but the contents of the tensors, for a rank that is about to receive them."""
        return {
            "values": self.values,
            "tensors": [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self.tensors.items()],
        }

    def has_shape_of(self, other: StateTree) -> bool:
        """Return whether all tensors have the names, shapes and types of the other's."""
        return _signature(self.tensors) == _signature(other.tensors)

    def is_described_by(self, description: Mapping[str, Any]) -> bool:
        """Return whether all tensors have the names, shapes and types of a description."""
        return bool(self.describe()["tensors"] == description["tensors"])

    def digest(self) -> str:
        """Return the SHA-256 of names, values and bytes: equal states have equal digests."""
        values = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(f"{values}{digest_tensors(self.tensors)}".encode()).hexdigest()


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names and bytes: equal replicas have equal digests."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(flat_bytes(tensors[name]))
    return hasher.hexdigest()


def allocate(description: Mapping[str, Any], device: torch.device) -> StateTree:
    """Make room for a state that another rank has described."""
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, shape, dtype in description["tensors"]
    }
    return StateTree(tensors, description["values"])


def described_bytes(description: Mapping[str, Any]) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in description["tensors"])


def tensor_at(path: str) -> dict[str, str]:
    """Return what stands for a tensor in the values of a `StateTree`."""
    return {_TENSOR: path}


def flatten(name: str, state: Any) -> StateTree:
    """Take a nested state apart. Raise `UsageError` for a value that is neither a tensor nor plain data."""
    tensors: dict[str, Tensor] = {}
    return StateTree(tensors, _flatten(name, state, tensors))


def unflatten(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a state together again."""
    match values:
        case {"$tensor": str(name)} if len(values) == 1:
            return take(tensors, name)
        case {"$pairs": list(pairs)} if len(values) == 1:
            return {unflatten(key, tensors): unflatten(value, tensors) for key, value in pairs}
        case {"$tuple": list(items)} if len(values) == 1:
            return tuple(unflatten(item, tensors) for item in items)
        case dict():
            return {key: unflatten(value, tensors) for key, value in values.items()}
        case list():
            return [unflatten(item, tensors) for item in values]
        case _:
            return values


def _flatten(path: str, state: Any, tensors: dict[str, Tensor]) -> Any:
    match state:
        case Tensor():
            tensors[path] = state.detach()
            return tensor_at(path)
        case bool() | int() | float() | str() | None:
            return state
        case np.generic():
            return state.item()
        case Mapping():
            items = [(key, _flatten(f"{path}.{key}", value, tensors)) for key, value in state.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
                return dict(items)
            return {_PAIRS: [[_flatten(path, key, tensors), value] for key, value in items]}
        case tuple():
            return {_TUPLE: [_flatten(f"{path}.{at}", item, tensors) for at, item in enumerate(state)]}
        case list():
            return [_flatten(f"{path}.{at}", item, tensors) for at, item in enumerate(state)]
        case _:
            raise UsageError(
                f"the state of {path} is a {type(state).__module__}.{type(state).__qualname__}, which cannot be sent "
                "to other ranks",
                why="a state consists of tensors, numbers, texts, and lists and dictionaries of them; nothing is "
                "pickled",
                fix="leave it out of state_dict(), or turn it into one of these there",
            )


def take(tensors: Mapping[str, Tensor], name: str, like: Tensor | None = None) -> Tensor:
    """Return a tensor of a checkpoint or of another rank; raise `CheckpointError` if it does not fit `like`."""
    tensor = tensors.get(name)
    is_fitting = tensor is not None and (like is None or (tensor.shape, tensor.dtype) == (like.shape, like.dtype))
    if tensor is None or not is_fitting:
        actual = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        wanted = "" if like is None else f", the training wants {tuple(like.shape)} {like.dtype}"
        raise CheckpointError(
            f"the checkpoint has {actual} for {name}{wanted}",
            why="it was written by a run with another model or optimizer",
            fix="resume with the program and the configuration of the run that wrote it",
        )
    return tensor


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of the same names into the targets."""
    for name, target in targets.items():
        target.copy_(take(tensors, name, target))


def weight_name(parameter: str) -> str:
    """Return the name of a parameter in checkpoint files and digests."""
    return f"model.{parameter}"


class TrainingState:
    """The model, the optimizers and the other objects of one replica."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        others: Sequence[Stateful] = (),
        epoch_schedulers: Sequence[Stateful] = (),
    ) -> None:
        # torch.compile wraps the model, and prefixes its names.
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.optimizers = list(optimizers)
        self.others = list(others)
        self.epoch_schedulers = list(epoch_schedulers)  # Those of the others that take a step with every epoch.
        # Kept: walking through the modules takes a millisecond for 150 parameters, and a step needs them five times.
        self.all_parameters = list(self.model.parameters())
        # The optimizers with this rank's pieces of the model, where it is divided among the ranks.
        self.divided: DividedOptimizers | None = None
        self.are_weights_divided = False  # The weights too: the model has them only while they are in use.
        saved = self.model.state_dict().keys()
        self._buffer_names = [name for name, _ in self.model.named_buffers() if name in saved]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that belong to the state, such as the running means of BatchNorm."""
        return {f"model.{name}": self.model.get_buffer(name) for name in self._buffer_names}

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by the names that checkpoint files and digests use, without divided ones."""
        parameters = {
            weight_name(name): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if not (self.are_weights_divided and parameter.requires_grad)
        }
        return parameters | self.buffers()

    def optimizer_state(self) -> StateTree:
        """Return the states of the optimizers and of the other objects: what is divided is only marked."""
        tensors: dict[str, Tensor] = {}
        values = []
        for label, state in self._states():
            tree = flatten(label, state)
            tensors |= tree.tensors
            values.append(tree.values)
        return StateTree(tensors, values)

    def updating(self) -> AbstractContextManager[None]:
        """Inside, the optimizers have what this rank updates."""
        return nullcontext() if self.divided is None else self.divided.updating()

    @property
    def summed_parameters(self) -> Sequence[Tensor]:
        """The tensors whose gradients are the sums over all ranks: this rank's pieces, where the model is divided."""
        return self.all_parameters if self.divided is None else [piece.weight for piece in self.divided.held]

    def updated_by(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Return the tensors that the updates of these optimizers change on this rank."""
        if self.divided is None and len(optimizers) == len(self.optimizers):
            return list(self.all_parameters)
        with self.updating():
            return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]

    def copy_schedule(self) -> StateTree:
        """Return a copy of the optimizers' options, such as the rate, and of the states of the other objects."""
        options = [options_of(optimizer) for optimizer in self.optimizers]
        tree = flatten("schedule", [options, [other.state_dict() for other in self.others]])
        return replace(tree, tensors=_copies(tree.tensors))

    def load_schedule(self, schedule: StateTree) -> None:
        # An object may keep the tensors that it loads and change them: it gets copies.
        options, states = unflatten(schedule.values, _copies(schedule.tensors))
        for other, state in zip(self.others, states, strict=True):
            other.load_state_dict(state)
        for optimizer, groups in zip(self.optimizers, options, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                load_options(group, values)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        fill(self.weights(), tensors)

    def load_optimizer_state(self, state: StateTree) -> None:
        """Load in place where the tensors have the same shapes: there may be no memory for a second copy."""
        current = self.optimizer_state()
        if current.values == state.values and current.has_shape_of(state):
            fill(current.tensors, state.tensors)
            return
        objects: list[Optimizer | Stateful] = [*self.optimizers, *self.others]
        if not isinstance(state.values, list) or len(state.values) != len(objects):
            raise CheckpointError(
                f"the checkpoint has the states of {len(state.values)} objects, and {len(objects)} are attached",
                why="it was written by another version of the program",
                fix="attach the same optimizers and objects, in the same order",
            )
        for target, values in zip(objects, state.values, strict=True):
            document = unflatten(values, state.tensors)
            if isinstance(target, Optimizer) and self.divided is not None:
                self._number_parameters(target, document)  # Refuses a state of other parameters.
                self.divided.load(target, document)
                continue
            if isinstance(target, Optimizer):
                document = self._number_parameters(target, document)
            target.load_state_dict(document)

    def reset_optimizers(self) -> None:
        """Forget what the optimizers have learned of the gradients."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def digest(self) -> str:
        state = self.optimizer_state()
        return StateTree({**self.weights(), **state.tensors}, state.values).digest()

    def _states(self) -> Iterator[tuple[str, Any]]:
        for index, optimizer in enumerate(self.optimizers):
            label = "optimizer" if index == 0 else f"optimizer{index}"
            if self.divided is not None:
                yield label, self.divided.common_state(optimizer)
            else:
                yield label, self._name_parameters(optimizer, optimizer.state_dict())
        for index, other in enumerate(self.others):
            yield f"{type(other).__name__.lower()}{index}", other.state_dict()

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters in the order in which it numbers them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]

    def _name_parameters(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Replace an optimizer's numbers by names: files and messages about them can be read."""
        names = self._names(optimizer)
        return {**state, "state": {names[number]: value for number, value in state["state"].items()}}

    def _number_parameters(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self._names(optimizer))}
        unknown = [name for name in state["state"] if name not in numbers]
        if unknown:
            raise CheckpointError(
                f"the checkpoint has a state of the optimizer for {unknown[0]}, which is not in this model",
                why="it was written by a run with another model",
                fix="resume with the program and the configuration of the run that wrote it",
            )
        return {**state, "state": {numbers[name]: value for name, value in state["state"].items()}}


def check_trainable(state: TrainingState, device: torch.device) -> None:
    """Refuse what cannot be trained data-parallel on a rank with this device, before any rank waits for another."""
    model = state.model
    wrapped = [module for module in (model, *model.children()) if isinstance(module, DistributedDataParallel)]
    if wrapped:
        raise UsageError(
            "the model is wrapped in DistributedDataParallel",
            why="the session exchanges the gradients itself: they would be exchanged twice",
            fix="attach the model itself, and call it in the loop: remove DistributedDataParallel(model)",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UsageError(
            f"the parameter {lazy[0]} has no shape yet",
            why="a lazy module gets its shapes from its first input, and ranks compare their models before that",
            fix="call the model once on one sample before you attach it",
        )
    trained = state.parameters()
    if not trained:
        raise UsageError("the model has no parameter that is trained", why="all of them have requires_grad=False")
    if elsewhere := [name for name, parameter in trained.items() if parameter.device != device]:
        raise UsageError(
            f"the parameter {elsewhere[0]} is on {trained[elsewhere[0]].device}, and this rank computes on {device}",
            why="batches of the session are on its device, and gradients are exchanged from there",
            fix="move the model before its optimizer is made: model.to(session.device)",
        )
    sparse = [name for name, m in model.named_modules() if getattr(m, "sparse", False) and isinstance(m, nn.Embedding)]
    if sparse:
        raise UsageError(
            f"the embedding {sparse[0]} has sparse gradients",
            why="gradients are exchanged as dense buffers",
            fix=f"make it dense: nn.Embedding(..., sparse=False) for {sparse[0]}",
        )
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    in_optimizers: set[int] = set()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            in_optimizers |= {id(parameter) for parameter in group["params"]}
    if in_optimizers - known.keys():
        raise UsageError(
            f"{len(in_optimizers - known.keys())} parameters of an optimizer are not parameters of the model",
            why="the optimizer was made for another model, or before the model was moved or wrapped",
            fix="make the optimizer from model.parameters() of the model that you attach, after model.to(device)",
        )
    if untrained := [name for name, parameter in trained.items() if id(parameter) not in in_optimizers]:
        raise UsageError(
            f"no optimizer updates the parameter {untrained[0]}"
            + (f" and {len(untrained) - 1} others" if len(untrained) > 1 else ""),
            why="its gradient would be exchanged in every step and never used",
            fix="attach its optimizer too, or freeze it: parameter.requires_grad_(False)",
        )
    overriding = [name for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    if overriding:
        raise UsageError(
            f"the module {overriding[0] or type(model).__name__} has an extra state",
            why="get_extra_state() may return any object, and nothing is pickled here",
            fix="keep that state in buffers, or attach an object with state_dict() for it",
        )


def load_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
            # A compiled step has captured the tensor of a rate.
            group[name].copy_(value)
        else:
            group[name] = value


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _signature(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

"""Optimizers whose state is divided among the ranks.

An optimizer of torch updates whole parameters and keeps moments of their size. Here it gets the *pieces* of them that
this rank keeps, for the time of its update: one-dimensional views of the same memory, with moments of their own size.
Everywhere else it has its parameters, as the program has given them. That is exact for every optimizer that treats each
element by itself; others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.sync.sharded.exchange import ExactPart, Part, Spread
from shoal.sync.sharded.held import HeldPiece, flat, hold_pieces, shaped_like
from shoal.sync.sharded.layout import Piece, ShardLayout

# Optimizers of torch that update each element by itself. A program's own class says so with `elementwise = True`.
_ELEMENTWISE = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
# Stands for a tensor of which every rank has its pieces, in the part of a state that all ranks have in common.
_DIVIDED = "divided:"
# Stands for the weight itself among the names of a state, where weights are divided too.
WEIGHT = "weight"
# What torch's optimizers keep once for each parameter: without dimensions, as the moments of a parameter without
# dimensions are.
ONCE = {"step", "mu_product", "eta", "mu"}


def check_elementwise(optimizers: Sequence[Optimizer], mode: str) -> None:
    """Refuse an optimizer for which a part of a parameter is not enough."""
    for optimizer in optimizers:
        kind = type(optimizer)
        is_torch = kind.__module__.startswith("torch.optim")
        if getattr(kind, "elementwise", is_torch and kind.__name__ in _ELEMENTWISE):
            continue
        raise UsageError(
            f"sync.mode={mode} cannot divide the optimizer {kind.__name__}",
            why="each rank updates its part of every parameter, and this optimizer may need whole parameters"
            if not is_torch
            else "it needs whole parameters, and each rank updates its part of them",
            fix="use AdamW or another optimizer that treats each element by itself, or --sync ddp"
            + ("" if is_torch else f"; if {kind.__name__} does, say so: class {kind.__name__}: elementwise = True"),
        )


@dataclass
class WaitingUpdate:
    """A step whose sums are complete on this rank, and which it has not applied yet."""

    step: int
    clip: float | None
    optimizers: Sequence[Optimizer]
    buffers: Sequence[Tensor] = ()  # Copies of the model's, as they are after the step.
    loss_sum: Tensor | None = None  # Of this rank.
    loss_factor: float = 1.0  # Makes it this rank's part of the world's loss.
    after: Callable[[], object] | None = None  # What the program does with the step.
    is_clipped: bool = False


@dataclass
class UpdateProgress:
    """How far the update of the newest step is on this rank."""

    waiting: WaitingUpdate | None = None
    last_norm: float = -1.0  # Of the step that was applied last.
    # What the program does with the step that was applied last, until all weights of it have arrived.
    after: Callable[[], object] | None = None


class DividedOptimizers:
    """The optimizers of a training, with the pieces that this rank keeps."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        layout: ShardLayout,
        rank: int,
        parts: Mapping[tuple[int, int], Part] | None = None,
        exact: Mapping[tuple[int, int], ExactPart] | None = None,
    ) -> None:
        """`parameters` are those of the layout, in its order, and the pieces are in their memory. Where weights are
        divided they are in that of `parts` instead, and where all ranks have rounded weights in that of `exact`."""
        self.parts = parts or {}
        self.exact = exact or {}
        self.update = UpdateProgress()
        self.layout = layout
        self.rank = rank
        self._optimizers = list(optimizers)
        self.parameters = dict(parameters)
        self._whole = values = list(parameters.values())
        self._names = {parameter: name for name, parameter in parameters.items()}
        own_parts: Mapping[tuple[int, int], Part] = self.parts or self.exact
        # Weights that are divided are in no memory but that of the parts.
        flats = [] if self.parts else [flat(parameter) for parameter in values]
        self._tensors = [] if self.parts else [parameter.detach() for parameter in values]  # In the pieces' memory.
        self._weights = [
            Spread(bucket, [flats[number] for number in bucket.parameters]) for bucket in layout.buckets if flats
        ]

        def numbers(bucket: int, owner: int, place: Piece) -> Tensor:
            if own_parts:
                return own_parts[bucket, owner].view(place.offset, place.offset + place.count)
            return flats[place.parameter][place.of_parameter]

        self.held: list[HeldPiece] = hold_pieces(layout, rank, numbers)
        self._pieces: dict[nn.Parameter, list[HeldPiece]] = {}
        for piece in self.held:
            self._pieces.setdefault(values[piece.parameter], []).append(piece)
        self._index = {
            parameter: number
            for number, optimizer in enumerate(self._optimizers)
            for parameter in _parameters_of(optimizer)
        }
        self._hooks = [optimizer.register_state_dict_pre_hook(_refuse_state_dict) for optimizer in self._optimizers]
        # Of a whole state that is there already.
        for optimizer in self._optimizers:
            for parameter in values:
                if (state := optimizer.state.pop(parameter, None)) is not None:
                    self._set_state(optimizer, parameter, state)

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks whose parts this rank keeps, itself first."""
        return self.layout.held_by(self.rank)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the optimizers have the pieces in place of their parameters."""
        self._take_back_memory()
        for (bucket, _), part in self.exact.items():
            part.make_whole(self._weights[bucket])
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [piece.weight for p in group["params"] for piece in self._pieces.get(p, ())]
        try:
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def _take_back_memory(self) -> None:
        """Copy weights that the program has put into other memory to where the pieces are."""
        for parameter, tensor in zip(self._whole, self._tensors, strict=not self.parts):
            if parameter.data_ptr() == tensor.data_ptr():
                continue
            if (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
                raise UsageError(
                    f"the parameter {self._names[parameter]} has got another shape or type: {tuple(parameter.shape)} "
                    f"{parameter.dtype}",
                    why="the model is divided among the ranks as it was when the session began",
                    fix="change the model before session.attach",
                )
            parameter.data = tensor.copy_(parameter)

    def drop_gradients(self) -> None:
        for piece in self.held:
            piece.weight.grad = None

    # The state as all ranks have it in common: numbers, and the names and types of what is divided.

    def common_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as `state_dict` does, by names, with marks for the tensors that are divided."""
        empty: dict[Any, Any] = {}
        kept, optimizer.state = optimizer.state, empty  # type: ignore[assignment]
        try:
            document = optimizer.state_dict()
        finally:
            optimizer.state = kept
        state = {
            self._names[parameter]: self._describe(optimizer, self._pieces[parameter][0])
            for parameter in _parameters_of(optimizer)
            if parameter in self._pieces and self._pieces[parameter][0].weight in optimizer.state
        }
        return {**document, "state": state}

    def _describe(self, optimizer: Optimizer, piece: HeldPiece) -> dict[str, Any]:
        state = optimizer.state[piece.weight]
        return {
            key: divided_mark(value.dtype) if _is_divided(value, piece.weight) else value
            for key, value in state.items()
        }

    def divided_keys(self) -> dict[str, dict[str, torch.dtype]]:
        """Return the tensors that are divided, by name of the parameter: the same on all ranks that have a state."""
        keys: dict[str, dict[str, torch.dtype]] = {}
        for piece in self.held:
            parameter = self._parameter(piece)
            state = self._state_of(parameter, piece)
            named = keys.setdefault(self._names[parameter], {})
            named |= {key: value.dtype for key, value in state.items() if _is_divided(value, piece.weight)}
        return keys

    def load(self, optimizer: Optimizer, document: Mapping[str, Any]) -> None:
        """Load a state by names: whole tensors are divided; of those that are only marked, zeros are made."""
        for group, saved in zip(optimizer.param_groups, document["param_groups"], strict=True):
            for name, value in saved.items():
                if name != "params":
                    group[name] = value
        known = {piece: optimizer.state.pop(piece.weight, {}) for piece in self.held}
        for name, state in document["state"].items():
            parameter = self.parameters[name]
            self._set_state(optimizer, parameter, state)
            for piece in self._pieces[parameter]:
                # What is only marked stays where it is known.
                marked = [key for key, value in state.items() if dtype_of_mark(value) is not None]
                optimizer.state[piece.weight] |= {key: known[piece][key] for key in marked if key in known[piece]}

    def release(self) -> None:
        """Forget the moments of these pieces: others have taken their place."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            for piece in self.held:
                optimizer.state.pop(piece.weight, None)

    # The numbers of a bucket, from place to place.

    def read(self, bucket: int, key: str, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the moments of a range that this rank keeps; zeros for parameters without them."""
        numbers = torch.zeros(end - begin, dtype=dtype)
        for piece, own, there in self._within(bucket, begin, end):
            if self.has(piece, key):
                numbers[there].copy_(self.tensor_of(piece, key)[own])
        return numbers

    def write(self, bucket: int, key: str, begin: int, numbers: Tensor) -> None:
        for piece, own, there in self._within(bucket, begin, begin + len(numbers)):
            if self.has(piece, key):
                self.tensor_of(piece, key)[own].copy_(numbers[there])

    def _within(self, bucket: int, begin: int, end: int) -> Iterator[tuple[HeldPiece, slice, slice]]:
        """Yield the pieces in a range of a bucket, with the places in the piece and in the range."""
        for piece in self.held:
            first = piece.place.offset
            low, high = max(begin, first), min(end, first + piece.place.count)
            if piece.bucket == bucket and low < high:
                yield piece, slice(low - first, high - first), slice(low - begin, high - begin)

    def publish(self, bucket: int, owner: int, weights: Spread) -> None:
        """Make the exact weights of a part those that all ranks have in common."""
        if (part := self.exact.get((bucket, owner))) is not None:
            part.make_whole(weights)
            weights.write(part.begin, part.begin + len(part.numbers), part.numbers)

    def moments_of(self, owner: int) -> dict[str, Tensor]:
        """Return the divided tensors of a part, by name and place."""
        return {
            f"{self._names[self._parameter(piece)]}.{key}.{piece.place.start}": value
            for piece in self.held
            if piece.owner == owner and piece.place.count
            for key, value in self._state_of(self._parameter(piece), piece).items()
            if _is_divided(value, piece.weight)
        }

    def tensor_of(self, piece: HeldPiece, key: str) -> Tensor:
        """Return a divided tensor of the state of a piece; one that is missing is made, of zeros."""
        if key == WEIGHT:
            return piece.weight.detach()
        state = self._state_of(self._parameter(piece), piece)
        if key not in state:
            state[key] = torch.zeros_like(piece.weight)
        tensor: Tensor = state[key]
        return tensor

    def has(self, piece: HeldPiece, key: str) -> bool:
        """Return whether the state of a piece has a divided tensor of this name."""
        return key == WEIGHT or key in self._state_of(self._parameter(piece), piece)

    def fill(self, parameter: nn.Parameter, key: str, numbers: Tensor) -> None:
        """Take this rank's pieces of a whole tensor, given in the order of the parameter's memory."""
        for piece in self._pieces[parameter]:
            self.tensor_of(piece, key).copy_(numbers[piece.place.of_parameter])

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _parameter(self, piece: HeldPiece) -> nn.Parameter:
        return self._whole[piece.parameter]

    def _state_of(self, parameter: nn.Parameter, piece: HeldPiece) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizers[self._index[parameter]].state[piece.weight]
        return state

    def _set_state(self, optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        for piece in self._pieces.get(parameter, ()):
            optimizer.state[piece.weight] = {
                key: _own_part(key, value, parameter, piece) for key, value in state.items()
            }


def _refuse_state_dict(optimizer: Optimizer) -> None:
    """Refuse the program's own `state_dict()`; that of this module asks for the state without the pieces."""
    if optimizer.state:
        raise UsageError(
            f"the program called {type(optimizer).__name__}.state_dict()",
            why="this rank has a part of the optimizer's state, and torch's method needs all of it",
            fix="a checkpoint of the run has all of it: optimizer.safetensors in RUN/checkpoints/step-…; or --sync ddp",
        )


def divided_mark(dtype: torch.dtype) -> str:
    return _DIVIDED + str(dtype).removeprefix("torch.")


def dtype_of_mark(value: Any) -> torch.dtype | None:
    """Return the type of the tensor that a mark stands for; None for any other value."""
    if not isinstance(value, str) or not value.startswith(_DIVIDED):
        return None
    dtype: torch.dtype = getattr(torch, value.removeprefix(_DIVIDED))
    return dtype


def _own_part(key: str, value: Any, parameter: nn.Parameter, piece: HeldPiece) -> Any:
    if (dtype := dtype_of_mark(value)) is not None:
        return torch.zeros(piece.place.count, dtype=dtype, device=piece.weight.device)
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and key not in ONCE:
        whole = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        return flat(whole)[piece.place.of_parameter].clone()
    return value.clone()


def _is_divided(value: Any, piece: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.shape and value.dim() > 0


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def join(parameter: nn.Parameter, numbers: Tensor) -> Tensor:
    """Return the whole state of a parameter from its elements in the order of its memory."""
    assert numbers.numel() == math.prod(parameter.shape)  # noqa: S101 - the caller has joined all pieces
    return shaped_like(numbers, parameter).contiguous()

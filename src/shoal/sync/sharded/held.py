"""The parts of the model that a rank keeps: its own, and the copy of another rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.sync.sharded.layout import Piece, ShardLayout


@dataclass(frozen=True)
class HeldPiece:
    """A range of a parameter that this rank updates."""

    place: Piece
    bucket: int
    owner: int  # The rank whose part it is in.
    weight: nn.Parameter  # One-dimensional: what an optimizer updates. Its gradient is the sum over all ranks.

    @property
    def parameter(self) -> int:
        return self.place.parameter


def flat(parameter: Tensor) -> Tensor:
    """Return a parameter's own memory as one dimension, in the order in which it lies there."""
    detached = parameter.detach()
    if detached.is_contiguous():
        return detached.view(-1)
    if not is_dense(detached):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} shares or skips memory",
            why="sharded methods divide the memory of every parameter among the ranks",
            fix="make it a tensor of its own before the optimizer is made: parameter.data = parameter.data.clone()",
        )
    return detached.as_strided((detached.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def give_memory(parameters: Iterable[Tensor]) -> None:
    """Give parameters whose memory was taken away memory again, with any contents."""
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.nbytes() < parameter.nbytes:
            storage.resize_(parameter.nbytes)


def own_memory(parameters: Iterable[Tensor]) -> None:
    """Move parameters to memory of their own, which can be taken away, unless they have it."""
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.resizable() or storage.nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()


def shaped_like(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Return one-dimensional numbers as a tensor with a parameter's shape, in the order of its memory."""
    return numbers.as_strided(parameter.shape, parameter.stride(), numbers.storage_offset())


def hold_pieces(layout: ShardLayout, rank: int, numbers: Callable[[int, int, Piece], Tensor]) -> list[HeldPiece]:
    """Return the pieces of all parts that a rank keeps. `numbers` returns the memory of a piece of bucket and owner.

    Of a parameter that is in other ranks' parts it keeps no elements, and a piece all the same: what an optimizer knows
    of a parameter beside its moments, such as the number of its updates, is then known to all ranks.
    """
    pieces = []
    for index, bucket in enumerate(layout.buckets):
        places = [(owner, place) for owner in layout.held_by(rank) for place in bucket.pieces(*bucket.part(owner))]
        held = {place.parameter for _, place in places}
        begin = bucket.cuts[rank]
        places += [(rank, Piece(parameter, 0, begin, 0)) for parameter in bucket.parameters if parameter not in held]
        pieces += [
            HeldPiece(place, index, owner, nn.Parameter(numbers(index, owner, place))) for owner, place in places
        ]
    return pieces


def squares_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares, in double precision."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms.double().square().sum()

"""Making replicas equal, and knowing that they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.waiting import await_work
from shoal.sync.world import World

_PIECE_BYTES = 16 << 20


def all_agree(world: World, digest: str) -> bool:
    """Whether every rank holds the same digest; 32 bytes a rank instead of the state itself."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8).to(world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return all(torch.equal(theirs, mine) for theirs in everyone)


def copy_from(world: World, source: int, tensors: Iterable[Tensor], keep: bool = True) -> None:
    """Overwrites every rank's tensors with those of `source`. Small ones travel together: each exchange costs the way
    there and back, and a model has hundreds of them. Without `keep` this rank takes part and drops what arrives: it has
    the same bits already, and an exchange that breaks must not leave half of them."""
    is_source = world.rank == source
    for piece in _pieces(tensors):
        if len(piece) == 1 and (is_source or keep):
            flat = piece[0]
        elif is_source:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in piece])
        else:
            flat = piece[0].new_empty(sum(tensor.numel() for tensor in piece))
        await_work(dist.broadcast(flat, src=source, group=world.group, async_op=True), world.release)
        if len(piece) > 1 and keep and not is_source:
            with torch.no_grad():
                for tensor, part in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
                    tensor.copy_(part.view_as(tensor))


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, up to so many bytes; the same on all ranks, since their tensors are alike."""
    piece: list[Tensor] = []
    for tensor in tensors:
        together = sum(each.nbytes for each in (*piece, tensor))
        if piece and (tensor.dtype != piece[0].dtype or together > _PIECE_BYTES):
            yield piece
            piece = []
        piece.append(tensor)
    if piece:
        yield piece


def tell_all(world: World, source: int, numbers: list[int]) -> list[int]:
    """A few integers from one rank to all."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    await_work(dist.broadcast(tensor, src=source, group=world.group, async_op=True), world.release)
    return [int(number) for number in tensor.cpu()]


def gather(world: World, numbers: list[int]) -> list[list[int]]:
    """A few integers of every rank, for all."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return [[int(number) for number in theirs.cpu()] for theirs in everyone]

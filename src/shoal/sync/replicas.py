"""Making replicas equal, and knowing that they are."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.interruptible import await_work
from shoal.sync.world import World

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


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


# SECTION sync/digests
# Cheap digests of a replica's state: enough to see that two replicas differ, and in which tensor.
#
# CRC-32 is made for flipped bits: it finds every change within any 32 bits in a row. It reads 2 GB/s a core (measured),
# also on processors without instructions for SHA-256.


_COMBINED_BYTES = 8
# Below, starting threads takes longer than they save: 120 tensors of 21 MB took 19 ms on two instead of 13 ms on one.
_THREADS_FROM_BYTES = 1 << 26


def tensor_digests(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The CRC-32 of every tensor's type, shape and bytes, in the order of `state`.

    Large states over as many threads as torch computes with: zlib lets go of the interpreter's lock.
    """
    threads = torch.get_num_threads()
    if threads == 1 or sum(tensor.nbytes for tensor in state.values()) < _THREADS_FROM_BYTES:
        return {name: _crc(tensor) for name, tensor in state.items()}
    # A large one that is begun last would be waited for alone.
    largest_first = sorted(state, key=lambda name: state[name].nbytes, reverse=True)
    with ThreadPoolExecutor(threads) as pool:
        found = dict(zip(largest_first, pool.map(lambda name: _crc(state[name]), largest_first), strict=True))
    return {name: found[name] for name in state}


def combined(digests: Mapping[str, int]) -> int:
    """One number for a whole state, whatever the order of its tensors; it fits a signed 64-bit integer."""
    hasher = hashlib.blake2b(digest_size=_COMBINED_BYTES)
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return int.from_bytes(hasher.digest(), "little", signed=True)


def flat_bytes(tensor: Tensor) -> Buffer:
    """The tensor's own memory where it lies in one piece on the CPU, otherwise a copy of it."""
    flat: Buffer = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return flat


def _crc(tensor: Tensor) -> int:
    # Going on from the shape's own sum: equal bytes in another shape are another tensor.
    form = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return zlib.crc32(flat_bytes(tensor), form)

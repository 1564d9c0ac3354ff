"""Make the tensors of all replicas equal, and check that they are."""

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

_CHUNK_BYTES = 16 << 20
_COMBINED_BYTES = 8
# Below, starting threads takes longer than they save: 120 tensors of 21 MB took 19 ms on two instead of 13 ms on one.
_THREADS_FROM_BYTES = 1 << 26


def broadcast_tensors(world: World, source: int, tensors: Iterable[Tensor], keep: bool = True) -> None:
    """Overwrite every rank's tensors with those of `source`.

    Small tensors travel together: each collective costs a round trip, and a model has hundreds of them. Without `keep`
    this rank takes part and drops what arrives: it has the same bits already, and an interrupted copy must not leave
    half of them.
    """
    is_source = world.rank == source
    for chunk in _chunks(tensors):
        if len(chunk) == 1 and (is_source or keep):
            flat = chunk[0]
        elif is_source:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        else:
            flat = chunk[0].new_empty(sum(tensor.numel() for tensor in chunk))
        # gloo's collectives are the processor's.
        sent = flat.detach().to(world.control_device)
        await_work(dist.broadcast(sent, src=source, group=world.group, async_op=True), world.release)
        if sent is not flat and keep and not is_source:
            with torch.no_grad():
                flat.copy_(sent)
        if len(chunk) > 1 and keep and not is_source:
            with torch.no_grad():
                for tensor, part in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                    tensor.copy_(part.view_as(tensor))


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbours of one type up to `_CHUNK_BYTES`; the same on all ranks, since their tensors are alike."""
    chunk: list[Tensor] = []
    for tensor in tensors:
        total_bytes = sum(member.nbytes for member in (*chunk, tensor))
        if chunk and (tensor.dtype != chunk[0].dtype or total_bytes > _CHUNK_BYTES):
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


def broadcast_integers(world: World, source: int, numbers: list[int]) -> list[int]:
    """Broadcast a few integers from one rank to all."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device=world.control_device)
    await_work(dist.broadcast(tensor, src=source, group=world.group, async_op=True), world.release)
    return [int(number) for number in tensor.cpu()]


def gather_integers(world: World, numbers: list[int]) -> list[list[int]]:
    """Return a few integers of every rank, on all ranks."""
    rows = _all_gather(world, torch.tensor(numbers, dtype=torch.int64, device=world.control_device))
    return [[int(number) for number in row.cpu()] for row in rows]


def have_equal_digests(world: World, digest: str) -> bool:
    """Return whether every rank has the same digest. It sends 32 bytes per rank instead of the state itself."""
    hashed = bytearray(hashlib.sha256(digest.encode()).digest())
    own = torch.frombuffer(hashed, dtype=torch.uint8).to(world.control_device)
    return all(torch.equal(row, own) for row in _all_gather(world, own))


def _all_gather(world: World, own: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(own) for _ in range(world.size)]
    await_work(dist.all_gather(rows, own, group=world.group, async_op=True), world.release)
    return rows


# Cheap digests of a replica's state: they show that two replicas differ, and in which tensor. CRC-32 is made for
# flipped bits: it finds every change within any 32 bits in a row. It reads 2 GB/s a core (measured), also on processors
# without instructions for SHA-256.


def tensor_digests(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the CRC-32 of every tensor's type, shape and bytes, in the order of `state`.

    Large states are read by as many threads as torch computes with: zlib releases the interpreter lock.
    """
    threads = torch.get_num_threads()
    if threads == 1 or sum(tensor.nbytes for tensor in state.values()) < _THREADS_FROM_BYTES:
        return {name: _crc(tensor) for name, tensor in state.items()}
    # Largest first: a large tensor that starts last would run alone.
    names = sorted(state, key=lambda name: state[name].nbytes, reverse=True)
    with ThreadPoolExecutor(threads) as pool:
        digests = dict(zip(names, pool.map(lambda name: _crc(state[name]), names), strict=True))
    return {name: digests[name] for name in state}


def combine_digests(digests: Mapping[str, int]) -> int:
    """Return one signed 64-bit number for a whole state, independent of the order of its tensors."""
    hasher = hashlib.blake2b(digest_size=_COMBINED_BYTES)
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return int.from_bytes(hasher.digest(), "little", signed=True)


def flat_bytes(tensor: Tensor) -> Buffer:
    """Return the tensor's own memory where it is contiguous on the CPU, otherwise a copy."""
    flat: Buffer = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return flat


def _crc(tensor: Tensor) -> int:
    # Starts from the checksum of the shape: equal bytes in another shape are another tensor.
    shape = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return zlib.crc32(flat_bytes(tensor), shape)

"""What a collective moves over the wire, by arithmetic."""

from __future__ import annotations


def payload_factor(world_size: int) -> float:
    """How often each rank sends the whole gradient in a ring all-reduce: `2(N-1)/N`.

    N-1 rounds of reduce-scatter and N-1 rounds of all-gather, each of one N-th; it tends to 2 however many ranks join.
    """
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    return 2 * (world_size - 1) / world_size


def ring_bytes(world_size: int, grad_bytes: int) -> float:
    """Bytes each rank sends (and receives) for one all-reduce of `grad_bytes`."""
    return payload_factor(world_size) * grad_bytes

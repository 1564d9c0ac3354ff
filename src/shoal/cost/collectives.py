"""What a collective moves over the wire, by arithmetic."""

from __future__ import annotations

from shoal.config.profile import Op


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


def bus_factor(op: Op, world_size: int) -> float:
    """Bytes on a link for each byte of the buffer, as nccl-tests has it: the bus bandwidth then compares with the wire,
    whatever the operation and however many ranks."""
    match op:
        case "all-reduce":
            return payload_factor(world_size)
        case "reduce-scatter" | "all-gather":
            return payload_factor(world_size) / 2
        case "broadcast":
            return 1.0


def algorithm_gbps(buffer_bytes: int, seconds: float) -> float:
    return 8e-9 * buffer_bytes / seconds


def bus_gbps(op: Op, world_size: int, buffer_bytes: int, seconds: float) -> float:
    return bus_factor(op, world_size) * algorithm_gbps(buffer_bytes, seconds)

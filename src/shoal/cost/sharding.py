"""Sharded data parallelism (`zero1`, `zero2`, `zero3`): the part of the training state that each rank keeps, and what
it sends."""

from __future__ import annotations

from collections.abc import Sequence

# While every rank has this many times the room for an equal part, equal parts are fastest: each rank updates as much.
_ROOM_FOR_EQUAL = 1.5
# Parts are whole multiples of one such fraction, so that small changes of the free memory move nothing.
_UNITS = 64


def copies_in(world_size: int, copies: int | None) -> int:
    """Return the copies of every part beside the owner's. `copies` is `sync.copies`; unset, two ranks keep none."""
    wanted = int(world_size > 2) if copies is None else copies
    return min(wanted, world_size - 1)


def payload(shard_level: int, world_size: int, micro_batches: int, copies: int) -> float:
    """Return how many times the bytes of all gradients a rank sends in a step.

    Gradients are scattered once a step, or from level 2 on for every micro-batch. Weights are gathered once a step, or
    at level 3 twice for every micro-batch. A part's owner sends the reduced gradients to the copy, which then needs no
    gather of that part.
    """
    scatters = 1 if shard_level == 1 else micro_batches
    gathers = 2 * micro_batches if shard_level == 3 else 1
    return (scatters * (world_size - 1) + copies + gathers * (world_size - 1 - copies)) / world_size


def part_shares(free_bytes: Sequence[float], fixed_bytes: float, part_bytes: float) -> tuple[float, ...]:
    """Return the fraction of the divided state that each rank takes; their sum is 1.

    `free_bytes` is the memory that each rank may fill, `fixed_bytes` what it holds anyway, and `part_bytes` the whole
    divided state with its copies. Parts are equal where every rank has ample room for that; otherwise they follow the
    room of each rank, in steps of 1/64, and every rank takes at least one step.
    """
    ranks = len(free_bytes)
    equal = (1 / ranks,) * ranks
    if all(free - fixed_bytes >= _ROOM_FOR_EQUAL * part_bytes / ranks for free in free_bytes):
        return equal
    units = max(_UNITS, 4 * ranks)
    least = part_bytes / units or 1.0
    rooms = [max(free - fixed_bytes, least) for free in free_bytes]
    wanted = [units * room / sum(rooms) for room in rooms]
    if all(abs(count - units / ranks) <= 0.5 for count in wanted):
        return equal
    above = [max(0.0, count - 1) for count in wanted]
    scaled = [(units - ranks) * count / sum(above) for count in above]
    counts = [1 + int(count) for count in scaled]
    by_remainder = sorted(range(ranks), key=lambda rank: int(scaled[rank]) - scaled[rank])
    for rank in by_remainder[: units - sum(counts)]:
        counts[rank] += 1
    return tuple(count / units for count in counts)


def held_fractions(shares: Sequence[float], copies: int, copy_shift: int = 1) -> tuple[float, ...]:
    """Return the fraction of the state that each rank keeps: its part, and the copy of the one `copy_shift` before."""
    if not copies:
        return tuple(shares)
    return tuple(share + shares[rank - copy_shift] for rank, share in enumerate(shares))

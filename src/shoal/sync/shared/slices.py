"""Summing rows of shared memory: each rank sums one slice of all rows, in the order of the ranks.

So every element is added up once, by one rank, in one order: all replicas get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Two ranks never write to one cache line (64 bytes, and 128 on some machines), for elements of two bytes and more.
_LINE = 64
# All rows' parts and the sum stay in the cache. A call takes some microseconds: blocks of 128 kB, which a core's own
# cache would hold, took 1.7 times as long in all (measured, four ranks).
BLOCK_BYTES = 1 << 20


def slice_of(begin: int, end: int, index: int, count: int) -> tuple[int, int]:
    """The part of `[begin, end)` that the rank with this index sums; empty where there is too little for all."""
    each = -(-(end - begin) // (count * _LINE)) * _LINE
    low = min(end, begin + index * each)
    return low, min(end, low + each)


def sum_rows(rows: Sequence[Tensor], low: int, high: int, into: Sequence[Tensor], scratch: Tensor) -> None:
    """Puts the sum over all rows of `[low, high)` in the same place of the rows `into`."""
    if low >= high:
        return
    sources, targets = ([row[low:high].split(len(scratch)) for row in each] for each in (rows, into))
    for first, second, *others, in_all in zip(*sources, zip(*targets, strict=True), strict=True):
        total = scratch[: len(first)]
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        for target in in_all:
            target.copy_(total)


def scratch_for(dtype: torch.dtype) -> Tensor:
    return torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)

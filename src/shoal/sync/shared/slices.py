"""Summing rows of shared memory: each rank sums one slice of all rows, in the order of the ranks.

So every element is added up once, by one rank, in one order: all replicas get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Two ranks never write to one cache line (64 bytes, and 128 on some machines), for elements of two bytes and more.
_LINE = 64
# All rows' parts and the sum itself stay in a core's own cache; much smaller ones cost more in calls than they save.
BLOCK_BYTES = 1 << 17


def slice_of(begin: int, end: int, index: int, count: int) -> tuple[int, int]:
    """The part of `[begin, end)` that the rank with this index sums; empty where there is too little for all."""
    each = -(-(end - begin) // (count * _LINE)) * _LINE
    low = min(end, begin + index * each)
    return low, min(end, low + each)


def sum_rows(rows: Sequence[Tensor], low: int, high: int, into: Sequence[Tensor], scratch: Tensor) -> None:
    """Puts the sum over all rows of `[low, high)` in the same place of the rows `into`."""
    for begin in range(low, high, len(scratch)):
        end = min(high, begin + len(scratch))
        total = scratch[: end - begin]
        torch.add(rows[0][begin:end], rows[1][begin:end], out=total)
        for row in rows[2:]:
            total.add_(row[begin:end])
        for row in into:
            row[begin:end].copy_(total)


def scratch_for(dtype: torch.dtype) -> Tensor:
    return torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)

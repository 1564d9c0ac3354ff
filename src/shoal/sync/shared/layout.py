"""Where each gradient lies in a row of shared memory, and which of them travel together. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A bucket begins at a cache line. Inside it gradients lie one behind the other, as wire formats expect them.
_LINE = 64

Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """In elements. `begins` and `bucket_of` are by tensor."""

    begins: tuple[int, ...]
    bucket_of: tuple[int, ...]
    buckets: tuple[Range, ...]

    @property
    def elements(self) -> int:
        return self.buckets[-1][1]


def lay_out(sizes: Sequence[int], bucket_elements: float) -> Layout:
    """In the given order; a bucket is closed by the tensor that fills it, as in DDP."""
    begins, bucket_of = [], []
    buckets: list[Range] = []
    begin = end = 0
    for number, size in enumerate(sizes, start=1):
        begins.append(end)
        bucket_of.append(len(buckets))
        end += size
        if end - begin >= bucket_elements or number == len(sizes):
            buckets.append((begin, end))
            begin = end = -(-end // _LINE) * _LINE
    return Layout(tuple(begins), tuple(bucket_of), tuple(buckets))

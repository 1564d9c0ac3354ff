"""Room that a bucket needs in every step, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.sync.wires.bucket import Bucket

T = TypeVar("T")


class Desks(Generic[T]):
    """One for each bucket, until DDP fills its buckets differently: after the first backward it knows in which order
    gradients come."""

    def __init__(self, make: Callable[[Bucket], T]) -> None:
        self._make = make
        self._kept: dict[int, tuple[tuple[int, ...], T]] = {}

    def of(self, bucket: Bucket) -> T:
        members = tuple(map(id, bucket.parameters))
        kept = self._kept.get(bucket.index)
        if kept is None or kept[0] != members:
            # Those behind it are of the old order too; there may be fewer of the new one.
            self._kept = {index: each for index, each in self._kept.items() if index < bucket.index}
            kept = self._kept[bucket.index] = (members, self._make(bucket))
        return kept[1]

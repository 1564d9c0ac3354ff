"""Which rank trains on which samples in which order.

The order of samples is a pure function of seed, epoch and position: a keyed permutation computed position by position
(a Feistel network, walked until it lands inside the range), not a shuffled list. It needs no memory, any rank can ask
for any position, and it is the same integer arithmetic on every machine. `numpy.random` guarantees no such thing across
its versions, and two ranks that disagree about the order would silently train on the wrong samples.

A program may draw samples with replacement instead, all with the same probability or by weight. What is drawn at a
position is a function of seed and position too, so every position is used once, whatever ranks come and go.

Data is split over ranks in one of two ways. `cursor`: one global order; each step takes the next global batch and
divides it over the ranks present, so the samples of a step do not depend on the number of ranks. `modulo`: rank r only
ever sees samples with `index % world_size == r`, as most tutorials do it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.cost.batch_plan import BatchPlan

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 4
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# In place of the number of an epoch, in the keys of draws.
_DRAW = -1


def sample_indices(positions: Indices, count: int, seed: int) -> Indices:
    """Return the sample at each position of the endless stream of epochs over `count` samples."""
    epochs, inside = np.divmod(positions, count)
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = permute(inside[chosen], count, seed, int(epoch))
    return result


def permute(positions: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Map each position by the epoch's permutation of `range(count)`."""
    half_bits = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= count).any():
        # The network permutes the next power of four, so a walk from inside must come back inside.
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: _Words, half_bits: int, keys: _Words) -> _Words:
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> np.uint64(half_bits), values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half_bits)) | right


def _round_keys(seed: int, epoch: int) -> _Words:
    start = _mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.array([epoch % 2**64], dtype=np.uint64)
    return _mix(start + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(words: _Words) -> _Words:
    """Apply the finaliser of splitmix64: every input bit flips about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


class Draw:
    """Draws a sample for every position, with replacement: by weight, or all with the same probability."""

    def __init__(self, weights: npt.NDArray[np.float64] | None = None) -> None:
        # Sums and products of doubles are rounded alike on every machine, and the sum is taken from left to right.
        self._bounds = None if weights is None else np.cumsum(weights)
        self._last = 0 if weights is None else int(np.flatnonzero(weights)[-1])

    def indices(self, positions: Indices, count: int, seed: int) -> Indices:
        """Return the sample that is drawn at each position of the endless stream."""
        keys = _round_keys(seed, _DRAW)
        words = _mix(_mix(positions.astype(np.uint64) ^ keys[0]) + keys[1])
        if self._bounds is None:
            equal: Indices = (words % np.uint64(count)).astype(np.int64)
            return equal
        parts = (words >> np.uint64(11)).astype(np.float64) / 2**53
        drawn: Indices = np.searchsorted(self._bounds, parts * self._bounds[-1], side="right")
        # A part of nearly one may be rounded up to the sum of all.
        return np.minimum(drawn, self._last)

    @property
    def checksum(self) -> int:
        """A number that differs where ranks draw by other weights."""
        return 1 if self._bounds is None else zlib.crc32(self._bounds.tobytes())


@dataclass(frozen=True)
class CursorShard:
    """This rank's samples when one global order is divided over the world."""

    rank: int
    plan: BatchPlan
    count: int
    seed: int
    draw: Draw | None = None  # Draws with replacement; without it each sample of an epoch comes once.

    def indices(self, cursor: int) -> Indices:
        """Return the samples of the step that begins at the global position `cursor`."""
        draw = sample_indices if self.draw is None else self.draw.indices
        return draw(np.arange(*self.positions(cursor)), self.count, self.seed)

    def positions(self, cursor: int) -> tuple[int, int]:
        """Return the positions of these samples in the global order, `[first, end)`."""
        first = cursor + self.plan.offset(self.rank)
        return first, first + self.plan.shares[self.rank]

    @property
    def size(self) -> int:
        """Samples of the first epoch that this rank trains on; the sizes of all ranks add up to `count`."""
        steps, rest = divmod(self.count, self.plan.global_batch)
        share = self.plan.shares[self.rank]
        return steps * share + min(max(rest - self.plan.offset(self.rank), 0), share)


@dataclass(frozen=True)
class ModuloShard:
    """This rank's samples when it owns every `world_size`-th sample."""

    rank: int
    plan: BatchPlan
    count: int
    seed: int

    def indices(self, cursor: int) -> Indices:
        inside = sample_indices(np.arange(*self.positions(cursor)), self.size, self.seed)
        return inside * len(self.plan.shares) + self.rank

    def positions(self, cursor: int) -> tuple[int, int]:
        """Return the positions of a step's samples in the order of this shard, `[first, end)`."""
        share = self.plan.shares[self.rank]
        first = cursor // self.plan.global_batch * share
        return first, first + share

    @property
    def size(self) -> int:
        return len(range(self.rank, self.count, len(self.plan.shares)))


Shard = CursorShard | ModuloShard
SHARDS: dict[str, type[CursorShard] | type[ModuloShard]] = {"cursor": CursorShard, "modulo": ModuloShard}

"""The order of data: a pure function of seed, epoch and position.

An epoch's order is a keyed permutation computed position by position (a Feistel network, walked until it lands inside
the range), not a shuffled list: it needs no memory, any rank can ask for any position, and it is the same integer
arithmetic on every machine. `numpy.random` promises no such thing across its versions, and two ranks that disagree
about the order would silently train on the wrong samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 4
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def window_count(tokens: int, seq_len: int) -> int:
    """How many samples a text has: windows of `seq_len` inputs whose last target is the next window's first token."""
    return max(0, (tokens - 1) // seq_len)


def sample_indices(positions: Indices, count: int, seed: int) -> Indices:
    """Which sample stands at each position of the endless stream of epochs over `count` samples."""
    epochs, inside = np.divmod(positions, count)
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = permute(inside[chosen], count, seed, int(epoch))
    return result


def permute(positions: Indices, count: int, seed: int, epoch: int) -> Indices:
    """The image of each position under the epoch's permutation of `range(count)`."""
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
    """splitmix64's finaliser: every bit of the input moves about half the bits of the output."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))

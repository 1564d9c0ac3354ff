"""Micro-batches of one fixed shape, copied straight from the memory map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.order import Indices
from shoal.data.shards import Shard

Tokens = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class Batches:
    """This rank's part of every step: `micro_batches(cursor)` yields arrays of `micro_batch` × (`seq_len` + 1)."""

    def __init__(self, tokens: Tokens, seq_len: int, shard: Shard) -> None:
        self.shard = shard
        self._tokens = tokens
        self._seq_len = seq_len

    def micro_batches(self, cursor: int) -> Iterator[Rows]:
        indices = self.shard.indices(cursor)
        size = self.shard.deal.micro_batch
        for start in range(0, len(indices), size):
            yield windows(self._tokens, indices[start : start + size], self._seq_len)

    def first_tokens(self) -> Tokens:
        """The first sample this rank trains on and what follows it, enough to show a whole sentence of it."""
        start = int(self.shard.indices(0)[0]) * self._seq_len
        return self._tokens[start : start + 2 * self._seq_len]


def windows(tokens: Tokens, indices: Indices, seq_len: int) -> Rows:
    """Inputs and targets share a row: targets are the row shifted by one."""
    rows = np.empty((len(indices), seq_len + 1), dtype=np.int64)
    for row, index in zip(rows, indices, strict=True):
        start = int(index) * seq_len
        row[:] = tokens[start : start + seq_len + 1]
    return rows


def validation_batches(
    tokens: Tokens, seq_len: int, sequences: int, micro_batch: int, rank: int, world_size: int
) -> Iterator[Rows]:
    """The first `sequences` windows of the validation text in whole micro-batches, every `world_size`-th one ours.

    The last micro-batch may be shorter; evaluation is not compiled for one shape, so no text is thrown away.
    """
    for start in range(rank * micro_batch, sequences, world_size * micro_batch):
        yield windows(tokens, np.arange(start, min(start + micro_batch, sequences)), seq_len)

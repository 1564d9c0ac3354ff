"""Which rank trains on which samples in which order, and the token files they are read from.

The order of samples is a pure function of seed, epoch and position: a keyed permutation computed position by position
(a Feistel network, walked until it lands inside the range), not a shuffled list. It needs no memory, any rank can ask
for any position, and it is the same integer arithmetic on every machine. `numpy.random` guarantees no such thing across
its versions, and two ranks that disagree about the order would silently train on the wrong samples.

Data is split over ranks in one of two ways. `cursor`: one global order; each step takes the next global batch and
divides it over the ranks present, so the samples of a step do not depend on the number of ranks. `modulo`: rank r only
ever sees samples with `index % world_size == r`, as most tutorials do it.

A token file is mapped into memory, not read:

    8 bytes    magic
    4 + 4      format version, length of the header (little-endian)
    header     JSON, padded with spaces so that the payload starts at a multiple of 64 bytes
    payload    the token ids, little-endian
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shoal.config.schema import Config
from shoal.cost.batch_plan import BatchPlan, divide_batch, micro_batch, rank_weights, world_batch
from shoal.errors import DataError, UsageError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 4
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def window_count(tokens: int, seq_len: int) -> int:
    """Count the samples of a text: windows of `seq_len` inputs whose last target is the next window's first token."""
    return max(0, (tokens - 1) // seq_len)


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


T = TypeVar("T")


@overload
def make_shard(rank: int, world_size: int) -> list[str]: ...
@overload
def make_shard(rank: int, world_size: int, items: Sequence[T]) -> list[T]: ...
def make_shard(rank: int, world_size: int, items: Sequence[T] | None = None) -> list[T] | list[str]:
    """Return the items with `index % world_size == rank`: disjoint, complete, and equal in size to within one.

    Without `items`, use the training sentences of the built-in English-verb corpus.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of {world_size} does not exist",
            why="ranks count from 0 to world_size - 1",
            fix="pass the two values that init_distributed() returns",
        )
    if items is None:
        from shoal.data.corpus import training_sentences

        return training_sentences()[rank::world_size]
    return list(items[rank::world_size])


def plan_global_batch(config: Config, world_size: int) -> BatchPlan:
    """Divide the global batch over the ranks. Accumulated batches count as one, in micro-batches of the usual size."""
    weights = rank_weights(config.run, world_size)
    batch = config.sync.accumulate * world_batch(config.train, world_size)
    return divide_batch(batch, micro_batch(config.train, weights), weights)


@dataclass(frozen=True)
class CursorShard:
    """This rank's samples when one global order is divided over the world."""

    rank: int
    plan: BatchPlan
    count: int
    seed: int

    def indices(self, cursor: int) -> Indices:
        """Return the samples of the step that begins at the global position `cursor`."""
        return sample_indices(np.arange(*self.positions(cursor)), self.count, self.seed)

    def positions(self, cursor: int) -> tuple[int, int]:
        """Return the positions of these samples in the global order, `[first, end)`."""
        first = cursor + self.plan.offset(self.rank)
        return first, first + self.plan.share(self.rank)

    @property
    def size(self) -> int:
        """Samples of the first epoch that this rank trains on; the sizes of all ranks add up to `count`."""
        steps, rest = divmod(self.count, self.plan.global_batch)
        share = self.plan.share(self.rank)
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
        return inside * len(self.plan.micro_batches) + self.rank

    def positions(self, cursor: int) -> tuple[int, int]:
        """Return the positions of a step's samples in the order of this shard, `[first, end)`."""
        share = self.plan.share(self.rank)
        first = cursor // self.plan.global_batch * share
        return first, first + share

    @property
    def size(self) -> int:
        return len(range(self.rank, self.count, len(self.plan.micro_batches)))


Shard = CursorShard | ModuloShard
SHARDS: dict[str, type[CursorShard] | type[ModuloShard]] = {"cursor": CursorShard, "modulo": ModuloShard}


Tokens = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class Batches:
    """This rank's part of every step, in micro-batches of one shape copied straight from the memory map."""

    def __init__(self, tokens: Tokens, seq_len: int, shard: Shard) -> None:
        self.shard = shard
        self._tokens = tokens
        self._seq_len = seq_len

    def micro_batches(self, cursor: int) -> Iterator[Rows]:
        """Yield arrays of `micro_batch` × (`seq_len` + 1) tokens."""
        indices = self.shard.indices(cursor)
        size = self.shard.plan.micro_batch
        for start in range(0, len(indices), size):
            yield windows(self._tokens, indices[start : start + size], self._seq_len)

    def first_tokens(self) -> Tokens:
        """Return the first sample of this rank and the next one: enough to show a whole sentence."""
        start = int(self.shard.indices(0)[0]) * self._seq_len
        return self._tokens[start : start + 2 * self._seq_len]


def windows(tokens: Tokens, indices: Indices, seq_len: int) -> Rows:
    """Copy windows into rows that inputs and targets share: targets are the row shifted by one."""
    rows = np.empty((len(indices), seq_len + 1), dtype=np.int64)
    for row, index in zip(rows, indices, strict=True):
        start = int(index) * seq_len
        row[:] = tokens[start : start + seq_len + 1]
    return rows


def validation_batches(
    tokens: Tokens, seq_len: int, sequences: int, micro_batch: int, rank: int, world_size: int
) -> Iterator[Rows]:
    """Yield this rank's micro-batches, every `world_size`-th, of the first `sequences` windows of the validation text.

    The last micro-batch may be shorter: evaluation is not compiled for one shape, so no text is dropped.
    """
    for start in range(rank * micro_batch, sequences, world_size * micro_batch):
        yield windows(tokens, np.arange(start, min(start + micro_batch, sequences)), seq_len)


FORMAT_VERSION = 1
_MAGIC = b"SHOALTOK"
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 64
_DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class TokenHeader:
    dtype: str
    count: int
    vocab_size: int
    # Of the payload.
    sha256: str
    tokenizer: str  # The digest of the tokenizer that encoded the text.


@dataclass(frozen=True)
class TokenFile:
    tokens: Tokens
    header: TokenHeader


def write_tokens(path: Path, tokens: Tokens, *, vocab_size: int, tokenizer: str) -> TokenHeader:
    """Write a token file atomically: its name appears when every byte is on disk. A full disk raises `OSError`."""
    payload = np.ascontiguousarray(tokens, dtype=tokens.dtype.newbyteorder("<"))
    dtype = payload.dtype.str
    if dtype not in _DTYPES:
        raise ValueError(f"tokens are {dtype}, a token file holds one of {_DTYPES}")
    header = TokenHeader(dtype, payload.size, vocab_size, _sha256(payload), tokenizer)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(_pack(header))
            file.write(payload.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return header


def open_tokens(path: Path, check: bool = False) -> TokenFile:
    """Map the tokens read-only. With `check`, read all of them once to compare the SHA-256."""
    try:
        with path.open("rb") as file:
            header, offset = _read_header(file, path)
            tokens = _map(path, header, offset)
    except OSError as error:
        raise DataError(
            f"cannot open the token file {path}: {error.strerror}",
            why="the encoded text is kept in the cache folder, which may have been emptied",
            fix="run the same command again: it encodes the text anew",
        ) from None
    if check and _sha256(tokens) != header.sha256:
        raise _damaged(path, "its content does not match its SHA-256", "bytes changed after it was written")
    return TokenFile(tokens, header)


def _map(path: Path, header: TokenHeader, offset: int) -> Tokens:
    dtype = np.dtype(header.dtype)
    expected_bytes, actual_bytes = offset + header.count * dtype.itemsize, path.stat().st_size
    if actual_bytes != expected_bytes:
        what = "cut short" if actual_bytes < expected_bytes else "longer than its header says"
        seen = f"it is {what}: {actual_bytes} bytes, not {expected_bytes}"
        raise _damaged(path, seen, "a write or a copy did not finish")
    if not header.count:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(header.count,))


def _pack(header: TokenHeader) -> bytes:
    text = json.dumps(asdict(header)).encode()
    length = -(-(_PREFIX.size + len(text)) // _ALIGNMENT) * _ALIGNMENT - _PREFIX.size
    return _PREFIX.pack(_MAGIC, FORMAT_VERSION, length) + text.ljust(length)


def _read_header(file: BinaryIO, path: Path) -> tuple[TokenHeader, int]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, f"it is cut short: {len(prefix)} bytes", "a write or a copy did not finish")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise _damaged(path, f"it begins with {magic!r}, not {_MAGIC!r}", "it is some other kind of file")
    if version != FORMAT_VERSION:
        raise _damaged(path, f"its format is {version}, not {FORMAT_VERSION}", "another release of shoal wrote it")
    return _parse_header(file.read(length), path), _PREFIX.size + length


def _parse_header(text: bytes, path: Path) -> TokenHeader:
    try:
        header = TokenHeader(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise _damaged(path, "its header is not readable", "bytes changed after it was written") from None
    counts = (header.count, header.vocab_size)
    if header.dtype not in _DTYPES or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise _damaged(path, f"its header has impossible values: {header}", "bytes changed after it was written")
    return header


def _sha256(payload: Tokens) -> str:
    return hashlib.sha256(payload.view(np.uint8).data).hexdigest()


def _damaged(path: Path, seen: str, why: str) -> DataError:
    return DataError(
        f"{path} is not a usable token file: {seen}", why=why, fix=f"rm {path}, then run the same command again"
    )

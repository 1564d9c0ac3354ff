"""Token files and the windows of a text that a training reads from them.

A token file is mapped into memory, not read:

    8 bytes    magic
    4 + 4      format version, length of the header (little-endian)
    header     JSON, padded with spaces so that the payload starts at a multiple of 64 bytes
    payload    the token ids, little-endian
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError

Indices = npt.NDArray[np.int64]


def window_count(tokens: int, seq_len: int) -> int:
    """Count the samples of a text: windows of `seq_len` inputs whose last target is the next window's first token."""
    return max(0, (tokens - 1) // seq_len)


Tokens = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class TokenWindows:
    """The samples of a text: windows of `seq_len` tokens and the next one, copied straight from the memory map."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return window_count(len(self.tokens), self.seq_len)

    def rows(self, indices: Indices) -> Rows:
        """Return an array of `len(indices)` × (`seq_len` + 1) tokens."""
        return windows(self.tokens, indices, self.seq_len)

    def text_at(self, index: int) -> Tokens:
        """Return a sample and the next one: enough to show a whole sentence."""
        start = index * self.seq_len
        return self.tokens[start : start + 2 * self.seq_len]


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
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"cannot map {path}") from None
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

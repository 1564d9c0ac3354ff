"""Encoded text in one file that is mapped into memory, not read.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError

FORMAT_VERSION = 1
_MAGIC = b"SHOALTOK"
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 64
_DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class TokenHeader:
    """`sha256` is of the payload; `tokenizer` is the digest of the tokenizer that made it."""

    dtype: str
    count: int
    vocab_size: int
    sha256: str
    tokenizer: str


@dataclass(frozen=True)
class TokenFile:
    tokens: npt.NDArray[Any]
    header: TokenHeader


def write_tokens(path: Path, tokens: npt.NDArray[Any], *, vocab_size: int, tokenizer: str) -> TokenHeader:
    """All or nothing: the name appears when every byte is on the disk. A full disk is the caller's `OSError`."""
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
    """The tokens as a read-only map. `check` reads all of them once to compare the SHA-256."""
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


def _map(path: Path, header: TokenHeader, offset: int) -> npt.NDArray[Any]:
    dtype = np.dtype(header.dtype)
    expected, found = offset + header.count * dtype.itemsize, path.stat().st_size
    if found != expected:
        what = "cut short" if found < expected else "longer than it says"
        raise _damaged(path, f"it is {what}: {found} bytes, not {expected}", "a write or a copy did not finish")
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
        raise _damaged(path, f"its header makes no sense: {header}", "bytes changed after it was written")
    return header


def _sha256(payload: npt.NDArray[Any]) -> str:
    return hashlib.sha256(payload.view(np.uint8).data).hexdigest()


def _damaged(path: Path, seen: str, why: str) -> DataError:
    return DataError(
        f"{path} is not a usable token file: {seen}", why=why, fix=f"rm {path}, then run the same command again"
    )

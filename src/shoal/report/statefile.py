"""A safetensors file as named spans of raw bytes.

The library's numpy reader knows no bfloat16 and loads whole tensors. A comparison of bits needs neither types nor more
than a block at a time, so the library only checks the file here, and the bytes are read directly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from shoal.errors import DataError
from shoal.report.ranklog import Floats
from shoal.runfolder import may, no_access

BLOCK_BYTES = 4 * 2**20  # a multiple of every element size, so that no block cuts a number in two

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class StateFile:
    path: Path
    tensors: dict[str, Tensor]

    def blocks(self, tensor: Tensor) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            for begin in range(tensor.begin, tensor.end, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, tensor.end - begin))


def open_state(path: Path) -> StateFile:
    if path.exists() and not may(path, os.R_OK):
        # The library says of such a file that it is not there.
        raise no_access(path, "be read")
    try:
        with safe_open(path, framework="np"):  # checks the header, the offsets and the length of the file
            pass
        return StateFile(path, _read_header(path))
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            why="the file is missing, cut off or damaged; a rank writes it as the last thing it does",
            fix=f"let the run write it again: shoal train --resume {path.parent}",
        ) from None


def as_floats(block: bytes, dtype: str) -> Floats | None:
    """The numbers of a block, or None for a type that numpy cannot widen (8-bit floats)."""
    if dtype == "BF16":
        block, dtype = (np.frombuffer(block, "<u2").astype("<u4") << np.uint32(16)).tobytes(), "F32"
    if dtype not in _NUMPY:
        return None
    with np.errstate(invalid="ignore"):  # a flipped bit can make a signalling NaN, which numpy warns of when widening
        return np.frombuffer(block, _NUMPY[dtype]).astype(np.float64)


def _read_header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {name: _tensor(entry, 8 + length) for name, entry in sorted(entries.items())}


def _tensor(entry: dict[str, list[int]], origin: int) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(str(entry["dtype"]), tuple(entry["shape"]), origin + begin, origin + end)

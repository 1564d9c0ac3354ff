"""TensorBoard event files, written without tensorboard or tensorflow.

A file is a sequence of TFRecords (length, checksum, bytes, checksum), and each holds an `Event` in protobuf's encoding.
Scalars need seven fields of three messages, which are written by hand here; docs/design.md has the reason.

    Event          1 wall_time: double   2 step: int64   3 file_version: string   5 summary: Summary
    Summary        1 value: repeated Value
    Summary.Value  1 tag: string   2 simple_value: float
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import IO

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf's wire types
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_LARGEST_FLOAT = 3.4028234663852886e38


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of the bytes; zlib has only the other polynomial."""
    table, value = _TABLE, 0xFFFFFFFF
    for byte in content:
        value = (value >> 8) ^ table[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def masked_crc32c(content: bytes) -> int:
    """Return the checksum as TFRecords have it: rotated and shifted, as a record may contain checksums itself."""
    value = crc32c(content)
    return (((value >> 15) | (value << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _delimited(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def event_file_name(began: float) -> str:
    """Return a name by which TensorBoard knows an event file; the same for each export of a run."""
    return f"events.out.tfevents.{int(began):010d}.shoal"


class ScalarWriter:
    """Appends scalars to an event file."""

    def __init__(self, file: IO[bytes], began: float) -> None:
        self._file = file
        self._tags: dict[str, bytes] = {}
        self._append(_key(1, _DOUBLE) + struct.pack("<d", began) + _delimited(3, b"brain.Event:2"))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Write all values of a step in one event."""
        summary = b"".join(_delimited(1, self._tag(name) + _float(value)) for name, value in values.items())
        head = _key(1, _DOUBLE) + struct.pack("<d", time) + _key(2, _VARINT) + _varint(step)
        self._append(head + _delimited(5, summary))

    def _tag(self, name: str) -> bytes:
        if name not in self._tags:
            self._tags[name] = _delimited(1, name.encode(errors="replace"))
        return self._tags[name]

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            b"".join((length, struct.pack("<I", masked_crc32c(length)), event, struct.pack("<I", masked_crc32c(event))))
        )


def _float(value: float) -> bytes:
    """Encode a scalar, which has single precision; a larger number is infinite there."""
    if abs(value) > _LARGEST_FLOAT:
        value = float("inf") if value > 0 else float("-inf")
    return _key(2, _FLOAT) + struct.pack("<f", value)

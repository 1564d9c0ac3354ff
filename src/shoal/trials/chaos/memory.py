"""Harm to a rank's memory, from outside as a cosmic ray does it: one bit of a weight, or a weight that is no number.

The weight is looked for by its bytes, which the newest checkpoint has. So the scenario's training must stand still: a
learning rate of 1e-30 changes no weight that is a 32-bit number.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shoal.errors import LabError

Harm = Literal["flip", "nan"]
_NOT_A_NUMBER = struct.pack("<f", float("nan"))
# Enough of a matrix to be found nowhere by chance.
_PATTERN = 256
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw\S* \S+ \S+ (\d+)")


def aim(pid: int, checkpoints: Path, how: Harm, draw: random.Random) -> Callable[[], None]:
    """At every copy of one weight in that process: to look for them takes longer than many steps, to hit them not."""
    name, pattern = known_weight(checkpoints)
    place = 4 * draw.randrange(_PATTERN // 4)
    number = pattern[place : place + 4]
    harmed = _NOT_A_NUMBER if how == "nan" else bytes([number[0] ^ 1 << draw.randrange(8), *number[1:]])
    with _memory(pid) as memory:
        found = list(_addresses(pid, memory, pattern))
    if not found:
        raise LabError(
            f"{name} of the last checkpoint is nowhere in the memory of process {pid}",
            why="its weights have changed since",
            fix="let them stand still: train.lr = 1e-30 in the scenario's training",
        )

    def hit() -> None:
        with _memory(pid) as memory:
            for address in found:
                os.pwrite(memory, harmed, address + place)

    return hit


@contextmanager
def _memory(pid: int) -> Iterator[int]:
    try:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as file:
            yield file.fileno()
    except PermissionError:
        raise LabError(f"the memory of process {pid} cannot be written", fix="try it as root") from None


def known_weight(checkpoints: Path) -> tuple[str, bytes]:
    """Of the newest whole checkpoint: its first matrix, and how that begins."""
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not whole:
        raise LabError(f"there is no checkpoint in {checkpoints}", why="the run had not come to its first one")
    content = (whole[-1] / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    tensors = json.loads(content[8 : 8 + length])
    matrices = sorted(name for name, entry in tensors.items() if len(entry.get("shape", ())) == 2)
    begin = 8 + length + tensors[matrices[0]]["data_offsets"][0]
    return matrices[0], content[begin : begin + _PATTERN]


def _addresses(pid: int, memory: int, pattern: bytes) -> Iterator[int]:
    """In what the process can write and no file stands behind, so far as it can be read."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = _MAPPING.match(line)
        if match is None or match[3] != "0":
            continue
        begin, end = int(match[1], 16), int(match[2], 16)
        try:
            content = os.pread(memory, end - begin, begin)
        except OSError:
            continue
        at = content.find(pattern)
        while at >= 0:
            yield begin + at
            at = content.find(pattern, at + 1)

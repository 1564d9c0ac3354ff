"""Harm to files: a full disk, a checkpoint with one flipped bit."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Literal

from shoal.errors import LabError

FILLER = "filler"
_BLOCK = bytes(64 * 1024)

Harm = Literal["flip", "truncate", "zero"]


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / FILLER).open("ab", buffering=0) as file:
        block = _BLOCK
        while block:
            try:
                file.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block = block[: len(block) // 2]


def free(disk: Path) -> None:
    (disk / FILLER).unlink(missing_ok=True)


def corrupt_newest(checkpoints: Path, how: Harm, draw: random.Random) -> Path:
    """One file of the newest whole checkpoint, chosen at random; which one is returned."""
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not whole:
        raise LabError(f"there is no checkpoint in {checkpoints}", why="the run had not come to its first one")
    files = sorted(path for path in whole[-1].iterdir() if path.is_file() and path.stat().st_size)
    chosen = draw.choice(files)
    chosen.write_bytes(harmed(chosen.read_bytes(), how, draw))
    return chosen


def harmed(content: bytes, how: Harm, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    match how:
        case "truncate":
            return content[:place]
        case "zero":
            return bytes(len(content))
        case "flip":
            changed = content[place] ^ (1 << draw.randrange(8))
            return content[:place] + bytes([changed]) + content[place + 1 :]

"""One rank's own part of a checkpoint: `rank-N.safetensors`, beside the common state on the rank's own machine.

It carries the mark of its save. A part of the same step from another life of the run, left on a machine that was away
for a while, does not fit and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.train.checkpoint import MANIFEST, sha256_of


def write_part(folder: Path, rank: int, tensors: Mapping[str, Tensor], mark: int) -> None:
    """Into the folder of a checkpoint that is not complete yet: its manifest will hold the sum."""
    file = _file(folder, rank)
    try:
        save_file(dict(tensors), file, metadata={"mark": str(mark)})
    except (OSError, SafetensorError) as error:
        file.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the part of rank {rank} in {folder}: {error}",
            why="without it a run resumed from this checkpoint goes on from the common state only",
            fix=f"free space or fix the folder: df -h {folder.parent}",
        ) from error


def read_part(folder: Path, rank: int, mark: int) -> dict[str, Tensor]:
    """Whole, undamaged and of this very save, or a `CheckpointError` that says what it is instead."""
    file = _file(folder, rank)
    try:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        if sha256_of(file) != sums[file.name]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one written")
        with safe_open(file, framework="pt") as opened:
            found = (opened.metadata() or {}).get("mark")
        if found != str(mark):
            raise CheckpointError(f"{file} belongs to another life of this run")
        return load_file(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"

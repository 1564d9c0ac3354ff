"""Pieces of files that come from other machines, put where they belong in our run folder and nowhere else."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ControlError


def keep_piece(run: Path, name: str, offset: int, piece: bytes, sender: str) -> None:
    path = run / name
    if not path.resolve().is_relative_to(run.resolve()):
        raise ControlError(
            f"{sender} wanted to write {name!r}, outside the run folder", why="it is not the shoal we know"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(piece)

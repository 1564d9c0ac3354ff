"""Pieces of files that come from another machine, put where they belong in our run folder and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ControlError

# More than any checkpoint here, less than what makes a file of holes a nuisance.
_LARGEST_FILE = 1 << 40
# A file's own name: neither `..` nor hidden nor longer than any disk takes.
_FILE = r"\w[\w.-]{0,99}"


class Homecoming:
    """What one node may send: its agent's and its ranks' words; with `keeps` also the ledger and a checkpoint.

    A file that is here from an earlier launch goes on where it ends, wherever the other machine begins: `start` says.
    """

    def __init__(self, run: Path, sender: str, keeps: bool = False) -> None:
        self._run = run
        self._sender = sender
        name = re.escape(sender)
        allowed = rf"agents/{name}\.(?:jsonl|log)|events/rank-\d{{1,6}}\.jsonl|logs/{name}/{_FILE}"
        if keeps:
            allowed += rf"|commits\.jsonl|checkpoints/step-\d{{8}}/{_FILE}"
        self._allowed = re.compile(allowed, re.ASCII)
        self._shift: dict[str, int] = {}

    def have(self) -> dict[str, int]:
        """How much of each file is here, counted as the other machine counts."""
        files = (path for path in self._run.rglob("*") if path.is_file())
        names = {str(path.relative_to(self._run)): path.stat().st_size for path in files}
        return {name: size - self._shift.get(name, 0) for name, size in names.items() if self._allowed.fullmatch(name)}

    def start(self, begins: Mapping[str, int]) -> None:
        """A new launch: from which byte on each file is sent; from the first one where nothing is said."""
        self._shift = {}
        self._shift = {name: size - int(begins.get(name, 0)) for name, size in self.have().items()}

    def keep(self, name: str, offset: int, piece: bytes) -> None:
        path = self._run / name
        if not self._allowed.fullmatch(name) or not path.resolve().is_relative_to(self._run.resolve()) or path.is_dir():
            raise ControlError(
                f"{self._sender} wanted to write {name!r} into the run folder",
                why="a machine sends home what its agent and its ranks wrote, and nothing else",
            )
        begin = offset + self._shift.get(name, 0)
        if not 0 <= begin <= _LARGEST_FILE - len(piece):
            raise ControlError(f"{self._sender} sent a piece of {name} that begins at byte {begin}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(begin)
            file.write(piece)

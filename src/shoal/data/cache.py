"""The cache of encoded texts: one folder an entry, complete or absent, checked against its SHA-256s before it is used.

An entry is built in a hidden folder beside its place and renamed into it, so two processes that build the same one at
the same time both end well: the first rename wins, and the loser throws its own away and uses the winner's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.control.private import user_cache
from shoal.data.tokenfile import open_tokens
from shoal.errors import DataError, UsageError

INDEX = "index"
_TOKENS = ".tokens"
# Each attempt loses only to another process that just finished, or repaired, the same entry.
_ATTEMPTS = 5

Index = dict[str, Any]


def cache_root(configured: Path | None) -> Path:
    """`data.cache_dir`, or where the XDG rules put caches; the same rules say to ignore a relative path."""
    try:
        if configured is not None:
            return configured.expanduser().absolute()
        return user_cache(os.environ)
    except RuntimeError:
        raise UsageError(
            "cannot tell where your cache folder is: there is no home folder",
            why="the encoded text is kept there, to be reused",
            fix="--set data.cache_dir=FOLDER",
        ) from None


def obtain(entry: Path, build: Callable[[Path], Index]) -> Index:
    """The index of a whole entry, built by `build(folder)` unless a good one is there; a damaged one is replaced."""
    index = read_entry(entry)
    if index is not None:
        return index
    workshop = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")
    try:
        workshop.mkdir(parents=True)
        index = {**build(workshop), "files": _digests(workshop)}
        (workshop / INDEX).write_text(_seal(index), encoding="utf-8")
        return _move_in(workshop, entry, index)
    except OSError as error:
        raise UsageError(
            f"cannot write the encoded text to {entry.parent}: {error.strerror}",
            why="it is kept there, to be reused; the folder is read-only, full or not yours",
            fix="choose another one: --set data.cache_dir=FOLDER",
        ) from None
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def read_entry(entry: Path) -> Index | None:
    """The index if every file it lists is there with the right SHA-256, otherwise nothing."""
    try:
        index = _unseal((entry / INDEX).read_text(encoding="utf-8"))
        whole = all(_file_digest(entry / name, check=True) == digest for name, digest in index["files"].items())
    except (OSError, ValueError, DataError):
        return None
    return index if whole else None


def _move_in(workshop: Path, entry: Path, index: Index) -> Index:
    for _ in range(_ATTEMPTS):
        try:
            workshop.rename(entry)
        except OSError:
            if not os.path.lexists(entry):
                raise
        else:
            return index
        winner = read_entry(entry)
        if winner is not None:
            return winner
        _throw_away(entry)
    raise FileExistsError(0, f"{entry.name} is damaged and cannot be replaced")


def _throw_away(entry: Path) -> None:
    """Renamed first: half of a removed entry must not look like an entry."""
    rubbish = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")
    try:
        entry.rename(rubbish)
    except FileNotFoundError:
        return
    if rubbish.is_dir():
        shutil.rmtree(rubbish, ignore_errors=True)
    else:
        rubbish.unlink()


def _seal(index: Index) -> str:
    """The index vouches for the files, and its first line for the index."""
    body = json.dumps(index, indent=1) + "\n"
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def _unseal(text: str) -> Index:
    seal, _, body = text.partition("\n")
    if seal != hashlib.sha256(body.encode()).hexdigest():
        raise ValueError("the index was changed after it was written")
    index: Index = json.loads(body)
    return index


def _digests(folder: Path) -> dict[str, str]:
    """Of files just written: a token file says its own, and gigabytes need not be hashed twice."""
    return {path.name: _file_digest(path, check=False) for path in sorted(folder.iterdir())}


def _file_digest(path: Path, check: bool) -> str:
    if path.suffix == _TOKENS:
        return open_tokens(path, check=check).header.sha256
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

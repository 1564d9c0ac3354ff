"""Open the small files of a run folder: configuration, job, manifest, prediction."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

# A manifest of 500 ranks has about 1 MB.
_MOST_BYTES = 64 << 20


def read_document(path: Path) -> dict[str, Any]:
    """Return a JSON or TOML file as a dictionary; empty if it is missing, damaged, too long, or not a regular file.

    A list, as in `scaling.json`, is returned under the name `points`.
    A folder may come from another machine: opening a pipe or a device would wait for its other end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                return {}
            text = file.read(_MOST_BYTES).decode()
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(document, list):
        return {"points": document}
    return document if isinstance(document, dict) else {}


class Documents:
    """Small files that are asked for again and again: each is read again only when it has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[int, dict[str, Any]]] = {}

    def read(self, path: Path) -> dict[str, Any]:
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return {}
        if path not in self._read or self._read[path][0] != changed:
            self._read[path] = (changed, read_document(path))
        return self._read[path][1]

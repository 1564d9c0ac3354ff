"""What trials have measured on this machine, in a small JSON file of the user's cache.

The file only saves time: whatever is wrong with it (damaged, foreign, unwritable), the trial is made again.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from shoal.control.rank_env import user_cache
from shoal.run_folder import write_atomically

_VERSION = 2
_MAX_TRIALS = 64


def trials_file() -> Path | None:
    try:
        return user_cache(os.environ) / "trials.json"
    except RuntimeError:
        return None


def recall(file: Path | None, key: str) -> Any:
    """Return what was remembered, which may be anything, or None."""
    return _read(file).get(key)


def remember(file: Path | None, key: str, entry: dict[str, Any]) -> None:
    """Write a trial, and keep only the newest ones. If two ranks write at once, one entry is lost."""
    if file is None:
        return
    trials = [(name, older) for name, older in _read(file).items() if name != key]
    newest = dict(trials[-_MAX_TRIALS + 1 :]) | {key: entry}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"version": _VERSION, "trials": newest}, indent=1) + "\n")


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return {}
    trials = document.get("trials")
    return trials if isinstance(trials, dict) else {}

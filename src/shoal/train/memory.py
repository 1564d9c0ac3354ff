"""What trials found on this machine, in one small JSON file of the user's cache.

It only ever saves time: whatever is wrong with it (damaged, foreign, unwritable), the trial is made anew.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shoal.data.cache import cache_root
from shoal.errors import ShoalError
from shoal.runfolder import write_atomically
from shoal.train.tuning import NEVER, Times

_VERSION = 1
_MOST = 64
_NAMES = {field.name for field in fields(Times)}


def trials_file() -> Path | None:
    try:
        return cache_root(None) / "trials.json"
    except ShoalError:
        return None


def recall(file: Path | None, key: str) -> Times | None:
    return _times(_read(file).get(key))


def remember(file: Path | None, key: str, times: Times) -> None:
    """The newest entries only; two ranks that write at once leave the entry of one of them."""
    if file is None:
        return
    kept = {name: entry for name, entry in _read(file).items() if name != key}
    newest = dict([*kept.items()][-_MOST + 1 :]) | {key: _document(times)}
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
    found = document.get("trials") if isinstance(document, dict) and document.get("version") == _VERSION else None
    return found if isinstance(found, dict) else {}


def _document(times: Times) -> dict[str, float | None]:
    """JSON has no infinity: what does not work has no time."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(times).items()}


def _times(entry: Any) -> Times | None:
    if not isinstance(entry, dict) or entry.keys() != _NAMES:
        return None
    if not all(value is None or _is_time(value) for value in entry.values()) or entry["plain_s"] is None:
        return None
    return Times(**{name: NEVER if value is None else float(value) for name, value in entry.items()})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0

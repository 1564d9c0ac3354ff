"""How much memory and disk is left here, for whatever limits us first: the machine or a container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import shoal
from shoal.net.scout.reading import read, read_number

_GROUP = Path("/sys/fs/cgroup")
TEMPORARY = "temporary files"


def memory() -> dict[str, int]:
    """In bytes; nothing where there is no /proc."""
    fields = dict(_fields(read("/proc/meminfo")))
    if "MemAvailable" not in fields:
        return {}
    swap = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    available, limit = fields["MemAvailable"], _left_in_group()
    return {
        "total": fields["MemTotal"],
        "available": available if limit is None else min(available, limit),
        "swap_total": swap[0],
        "swap_used": swap[0] - swap[1],
    }


def _fields(text: str) -> list[tuple[str, int]]:
    lines = (line.split() for line in text.splitlines())
    return [(words[0].rstrip(":"), int(words[1]) * 1024) for words in lines if len(words) > 1]


def _left_in_group() -> int | None:
    """A container's own limit, as version 2 shows it at its root. What it holds of files is given up when need be."""
    limit, used = read_number(_GROUP / "memory.max"), read_number(_GROUP / "memory.current")
    if limit is None or used is None:
        return None
    lines = (line.split() for line in read(_GROUP / "memory.stat").splitlines())
    files = sum(int(words[1]) for words in lines if words[0] == "inactive_file")
    return max(0, limit - used + files)


def disks() -> list[dict[str, Any]]:
    """Where a run writes, one entry a disk."""
    found: dict[int, dict[str, Any]] = {}
    for purpose, place in _places().items():
        try:
            state, device = os.statvfs(place), place.stat().st_dev
        except OSError:
            continue
        entry = found.setdefault(device, {"path": str(place), "for": [], "free": state.f_bavail * state.f_frsize})
        entry["for"].append(purpose)
        # Some file systems count no files, and say zero for all of them.
        entry["files_free"] = state.f_favail if state.f_files else None
        entry["read_only"] = bool(state.f_flag & os.ST_RDONLY)
    return list(found.values())


def _places() -> dict[str, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = {TEMPORARY: Path(_temporary()), "runs": _runs(), "encoded text": cache}
    return {purpose: _existing(place) for purpose, place in found.items()}


def _temporary() -> str:
    """Not `tempfile.gettempdir`, which quietly takes another folder when this one is full."""
    return os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - looked at, not written


def _runs() -> Path:
    """In the folder that somebody works in, or, on a machine that was only sent our code, beside that."""
    here = Path.cwd()
    return here if here != Path("/") else Path(shoal.__file__).parent


def _existing(place: Path) -> Path:
    """The nearest folder above that is there; nobody needs to be let into all of them."""
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError):
            if folder.exists():
                return folder
    return Path("/")

"""Small files of the kernel and of /etc, which may be missing or closed to us: then there is nothing to say."""

from __future__ import annotations

from pathlib import Path


def read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path | str) -> int | None:
    """None also where it says `max` or something else that is no number."""
    try:
        return int(read(path))
    except ValueError:
        return None


def read_list(path: Path | str) -> set[int]:
    """`0-3,8` as the kernel writes sets of processors."""
    found: set[int] = set()
    for part in filter(None, read(path).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found

"""Is there enough memory and disk on each machine for a run?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from shoal.net.checks.commands import again
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene
from shoal.net.scout.room import TEMPORARY
from shoal.units import format_si

_DISK_ERROR, _DISK_WARNING = 100e6, 2e9
# Often in memory, and small on purpose; nothing large is written there.
_TEMPORARY_WARNING = 500e6
_FEW_FILES = 1000
# torch alone takes a quarter of a gigabyte a rank, before there is any model.
_MEMORY_ERROR, _MEMORY_WARNING = 300e6, 1e9


def memory(scene: Scene) -> Iterator[Finding]:
    for node, seen in _seen(scene, "memory"):
        if seen and seen["available"] < _MEMORY_WARNING:
            yield Finding(
                "memory.free",
                Severity.ERROR if seen["available"] < _MEMORY_ERROR else Severity.WARNING,
                node,
                f"{format_si(seen['available'], 'B')} of {format_si(seen['total'], 'B')} memory are free, "
                f"{format_si(seen['swap_used'], 'B')} of swap in use",
                "a rank that needs more is slowed down by the disk or ended by the kernel: close other programs (the "
                "largest: ps -eo pid,rss,comm --sort=-rss | head), or train a smaller model",
                retest=f"free -h; {again(scene)}",
            )


def disks(scene: Scene) -> Iterator[Finding]:
    for node, seen in _seen(scene, "disks"):
        for disk in seen or ():
            yield from _read_only(scene, node, disk) if disk["read_only"] else _full(scene, node, disk)


def _full(scene: Scene, node: str, disk: dict[str, Any]) -> Iterator[Finding]:
    free, files, place = disk["free"], disk["files_free"], shlex.quote(disk["path"])
    few_files = files is not None and files < _FEW_FILES
    enough = _TEMPORARY_WARNING if disk["for"] == [TEMPORARY] else _DISK_WARNING
    if free >= enough and not few_files:
        return
    left = f"room for {files} more files" if few_files and free >= _DISK_ERROR else f"{format_si(free, 'B')} free"
    yield Finding(
        "disk.free",
        Severity.ERROR if free < _DISK_ERROR or few_files else Severity.WARNING,
        node,
        f"{left} in {disk['path']}, which is for {', '.join(disk['for'])}",
        "checkpoints, logs and copies will not fit: remove what you no longer need (what takes the room: "
        f"du -xah {place} | sort -h | tail), or work on another disk",
        retest=f"df -h {place}; {again(scene)}",
    )


def _read_only(scene: Scene, node: str, disk: dict[str, Any]) -> Iterator[Finding]:
    place = shlex.quote(disk["path"])
    yield Finding(
        "disk.readonly",
        Severity.ERROR,
        node,
        f"nothing can be written to {disk['path']}, which is for {', '.join(disk['for'])}: it is mounted read-only",
        "a run cannot write its logs and checkpoints there; Linux does this to a disk that has errors (see: dmesg)",
        retest=f"findmnt --target {place}; {again(scene)}",
    )


def _seen(scene: Scene, topic: str) -> Iterator[tuple[str, Any]]:
    return ((node, facts.get("machine", {}).get(topic)) for node, facts in scene.facts.items())

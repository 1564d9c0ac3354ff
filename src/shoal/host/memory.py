"""How much memory this process may use: that of the machine, within the limits of its control groups.

A container, a batch system, systemd or a lab sets such a limit; the kernel kills a process of a group that needs more.

Standard library only, apart from systems without /proc: the collector of `shoal doctor` runs this on machines where
nothing else is installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.host.proc import PROC, read_meminfo, read_number, read_text
from shoal.host.topology import SYS, control_groups

# In the statistics of a group: what the kernel drops before it lacks memory.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_OOM_FILES = ("memory.events", "memory.oom_control")  # of version 2 and of version 1


# Options of mallopt: blocks from 4 MB on are mapped one by one (M_MMAP_MAX, M_MMAP_THRESHOLD), and the heap gives back
# what is free at its end from 64 MB on (M_TRIM_THRESHOLD).
_RETURN_LARGE_BLOCKS = {-4: 1 << 16, -3: 4 << 20, -1: 64 << 20}


@dataclass(frozen=True)
class _GroupMemory:
    """One control group with a limit."""

    limit_bytes: int
    free_bytes: int
    free_swap_bytes: int | None  # None: as much as the machine has


def memory_limit_bytes(sys_root: Path = SYS, proc_root: Path = PROC) -> int | None:
    """Return the lowest limit of the control groups that this process is in; None if the machine has less anyway."""
    return min((group.limit_bytes for group in _limited_groups(sys_root, proc_root)), default=None)


def total_bytes(sys_root: Path = SYS, proc_root: Path = PROC) -> int:
    return memory_limit_bytes(sys_root, proc_root) or _machine_bytes("MemTotal", proc_root)


def available_bytes(sys_root: Path = SYS, proc_root: Path = PROC, with_swap: bool = False) -> int:
    """Return what this process can still take, files in the cache included: the kernel drops them.

    `with_swap` adds free swap: a program that needs it is slow, but is not killed.
    """
    swap_bytes = read_meminfo(proc_root).get("SwapFree", 0) if with_swap else 0
    sizes = [_machine_bytes("MemAvailable", proc_root) + swap_bytes]
    for group in _limited_groups(sys_root, proc_root):
        free_swap_bytes = swap_bytes if group.free_swap_bytes is None else group.free_swap_bytes
        sizes.append(group.free_bytes + min(swap_bytes, free_swap_bytes))
    return min(sizes)


def count_oom_kills(sys_root: Path = SYS, proc_root: Path = PROC) -> int:
    """Return how often the kernel has killed a process of this control group for lack of memory.

    Without such a group, count those of the whole machine since boot.
    """
    files = (folder / name for folder in control_groups("memory", sys_root, proc_root) for name in _OOM_FILES)
    counts = (_read_fields(file).get("oom_kill") for file in (*files, proc_root / "vmstat"))
    return next((count for count in counts if count is not None), 0)


def _limited_groups(sys_root: Path, proc_root: Path) -> Iterator[_GroupMemory]:
    """Yield the groups that limit this process. Version 1 has a huge number where there is no limit."""
    machine_bytes = read_meminfo(proc_root).get("MemTotal", 0)
    for folder in control_groups("memory", sys_root, proc_root):
        stat = _read_fields(folder / "memory.stat")
        limit, used = read_number(folder / "memory.max"), read_number(folder / "memory.current")
        swap_limit = read_number(folder / "memory.swap.max")
        free_swap = None if swap_limit is None else swap_limit - (read_number(folder / "memory.swap.current") or 0)
        if used is None:
            limit, used = read_number(folder / "memory.limit_in_bytes"), read_number(folder / "memory.usage_in_bytes")
            free_swap = 0 if read_number(folder / "memory.swappiness") == 0 else None
            # Its use has that of the groups below it, and so must have what can be reclaimed.
            stat = {name.removeprefix("total_"): size for name, size in stat.items() if name.startswith("total_")}
        if limit is not None and used is not None and limit < machine_bytes:
            reclaimable = sum(stat.get(name, 0) for name in _RECLAIMABLE)
            yield _GroupMemory(limit, max(0, min(limit, limit - used + reclaimable)), free_swap)


def _machine_bytes(field: str, proc_root: Path) -> int:
    """Return `MemTotal` or `MemAvailable` of /proc/meminfo; psutil knows systems without that file."""
    fields = read_meminfo(proc_root)
    if field in fields:
        return fields[field]
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total if field == "MemTotal" else memory.available)


def _read_fields(file: Path) -> dict[str, int]:
    """Return the lines `name number` of a file."""
    lines = (line.split() for line in read_text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def return_freed_memory() -> None:
    """Let glibc give large blocks back to the system when they are freed, whatever it was told at its start.

    A rank that divides a model frees what it has no room for: kept by the allocator it would be used all the same.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in _RETURN_LARGE_BLOCKS.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)

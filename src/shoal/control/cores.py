"""Which cores a rank computes on: the machine's topology as the kernel tells it, and the deal. Torch-free.

Ranks that share a machine each get physical cores of their own, fast ones first, never more than this process may use
already: what `taskset`, a container or a batch system has set stays in force.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
# Intel names its fast cores in a list, ARM gives every core a number.
_FAST_CPUS = Path("/sys/devices/cpu_core/cpus")


@dataclass(frozen=True)
class Core:
    """A physical core by its hardware threads, as far as we may use them. `speed` is relative to the other cores."""

    cpus: tuple[int, ...]
    speed: int = 1


def deal_cores(cores: Sequence[Core], slot: int, ranks: int, threads: int) -> tuple[int, ...] | None:
    """The hardware threads for rank `slot` of the `ranks` on this machine; None where pinning cannot help.

    That is where ranks want more cores than there are (the scheduler shares them more fairly than we could), and where
    one rank has all of them anyway. A rank gets both hardware threads of a core: the second one is for its
    communication, which would otherwise interrupt the first.
    """
    if ranks * threads > len(cores) or threads == len(cores):
        return None
    # Stable, so that neighbours, which often share a cache, stay together.
    by_speed = sorted(cores, key=lambda core: -core.speed)
    mine = by_speed[slot * threads : (slot + 1) * threads]
    return tuple(sorted(cpu for core in mine for cpu in core.cpus))


def usable_cores() -> list[Core]:
    """In the order of their numbers; none where the system does not tell (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    fast = read_cpu_list(_read(_FAST_CPUS))
    siblings = {cpu: read_cpu_list(_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")) or {cpu} for cpu in usable}
    groups = sorted({tuple(sorted(siblings[cpu] & usable)) for cpu in usable})
    return [Core(group, _speed(group[0], fast)) for group in groups]


def read_cpu_list(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it; nothing for what it is not."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _speed(cpu: int, fast: set[int]) -> int:
    if fast:
        return int(cpu in fast)
    capacity = _read(_CPUS / f"cpu{cpu}/cpu_capacity").strip()
    return int(capacity) if capacity.isdigit() else 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""

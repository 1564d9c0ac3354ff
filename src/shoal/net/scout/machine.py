"""What this machine is: system, processor, versions; and how much room and pace it has to give."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import shoal
from shoal.net.scout import pace, room
from shoal.net.scout.reading import read, read_list, read_number

_CPUS = Path("/sys/devices/system/cpu")
_LSCPU_S = 2.0


def observe(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu_name(),
        "avx2": has_avx2(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": installed("torch"),
        "shoal": shoal.__version__,
        # Root needs no sudo, and in a container it often has none.
        "is_root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "cores": cores(),
        "memory": room.memory(),
        "disks": room.disks(),
        **pace.observe(),
    }


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """/proc/cpuinfo names an ARM core only by number, and lscpu is not everywhere."""
    try:
        words = ["lscpu", "--json"]
        done = subprocess.run(
            words, capture_output=True, timeout=_LSCPU_S, check=True, env={**os.environ, "LC_ALL": "C"}
        )
        fields = {entry["field"]: entry["data"] for entry in json.loads(done.stdout)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def has_avx2() -> bool | None:
    """None where the question makes no sense: only x86 has it."""
    flags = _of_cpuinfo("flags")
    return "avx2" in flags.split() if flags else None


def _of_cpuinfo(field: str) -> str:
    lines = read("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cores() -> dict[str, Any]:
    """`threads` that we may use, on how many `physical` cores; `fast` and `slow` ones where they are not alike. `quota`
    is what a container allows, in cores."""
    usable = _usable()
    fast = _fast(usable)
    found = {"threads": len(usable), "physical": _physical(usable), "quota": _quota()}
    kinds = {"fast": _physical(fast), "slow": _physical(usable - fast)}
    return {**found, **kinds} if fast and fast != usable else found


def _physical(cpus: set[int]) -> int:
    """Two hardware threads of one core share its arithmetic, so they count once."""
    return len({read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _fast(usable: set[int]) -> set[int]:
    """Intel has a folder for each kind, ARM a number for every core."""
    if named := read_list("/sys/devices/cpu_core/cpus"):
        return named & usable
    capacity = {cpu: read_number(_CPUS / f"cpu{cpu}/cpu_capacity") or 0 for cpu in usable}
    return {cpu for cpu in usable if capacity[cpu] == max(capacity.values())}


def _quota() -> float | None:
    limit, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None

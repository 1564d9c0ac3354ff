"""What this machine is, as its peers need to know it before they train together. Torch-free and quick."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path

import psutil


def physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core share its arithmetic, so they count once."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


@cache
def cpu_name() -> str:
    """`platform.processor()` is empty on most Linux machines, and /proc/cpuinfo names an ARM core only by number."""
    try:
        listing = subprocess.run(["/usr/bin/lscpu", "--json"], capture_output=True, timeout=5, check=True).stdout
        fields = {entry["field"]: entry["data"] for entry in json.loads(listing)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return platform.processor() or platform.machine()


def has_avx2() -> bool | None:
    """None where the question makes no sense: only x86 has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), None)
    return None if flags is None else "avx2" in flags.split()


def installed(package: str) -> str:
    """A package's version without importing it; a build's local tag (`+cpu`) says nothing about agreement."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def boot_clock() -> float:
    """Seconds that go on while the machine sleeps; CLOCK_MONOTONIC stands still then."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

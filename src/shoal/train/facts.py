"""What this machine and this process are, for the `start` event."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

import shoal


@cache
def cpu_name() -> str:
    """`platform.processor()` is empty on most Linux machines, and /proc/cpuinfo names an ARM core only by number."""
    try:
        listing = subprocess.run(["/usr/bin/lscpu", "--json"], capture_output=True, timeout=5, check=True).stdout
        fields = {entry["field"]: entry["data"] for entry in json.loads(listing)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on, which taskset or a container may have cut."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _boot_id() -> str | None:
    """The same for all emulated nodes of one machine, which share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "boot_id": _boot_id(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shoal": shoal.__version__,
        "numpy": numpy.__version__,
    }

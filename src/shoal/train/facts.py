"""What this machine and this process are, for the `start` event."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
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


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shoal": shoal.__version__,
        "numpy": numpy.__version__,
    }

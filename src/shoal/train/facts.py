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
from shoal.control.process import physical_cores
from shoal.sync.world import World


@cache
def cpu_name() -> str:
    """`platform.processor()` is empty on most Linux machines, and /proc/cpuinfo names an ARM core only by number."""
    try:
        listing = subprocess.run(["/usr/bin/lscpu", "--json"], capture_output=True, timeout=5, check=True).stdout
        fields = {entry["field"]: entry["data"] for entry in json.loads(listing)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return platform.processor() or platform.machine()


def _boot_id() -> str | None:
    """The same for all emulated nodes of one machine, which share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
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


def describe_process(world: World) -> dict[str, Any]:
    return {
        "world_size": world.size,
        "node": world.node,
        "local_rank": world.local_rank,
        "generation": world.generation,
        "pid": os.getpid(),
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "interface": world.interface,
        "link_mbps": world.link_mbps,
        "versions": versions(),
        "hardware": hardware(),
    }

"""What this machine and this process are, for the `start` event."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

import shoal
from shoal.control.machine import cpu_name, physical_cores
from shoal.sync.world import World


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
        "generation": str(world.generation),
        "lineage": str(world.lineage.name),
        "pid": os.getpid(),
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "interface": world.interface,
        "link_mbps": world.link_mbps,
        "versions": versions(),
        "hardware": hardware(),
    }

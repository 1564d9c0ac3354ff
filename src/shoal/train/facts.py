"""What this machine and this process are, for the `start` event."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

import shoal


@cache
def cpu_name() -> str:
    """`platform.processor()` is empty on most Linux machines; ARM kernels name the part only by number."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(_split(line) for line in text.splitlines() if ":" in line)
    return fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', '?')}"


def _split(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


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

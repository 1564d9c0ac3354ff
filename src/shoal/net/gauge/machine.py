"""What this machine is, as far as a profile needs it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def facts(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": _machine(),
        "iperf3": iperf3_version(),
        "torch": _installed("torch"),
    }


def iperf3_version() -> str | None:
    """None where it is not installed, or does not start."""
    tool = shutil.which("iperf3")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"iperf (\d[\d.]*)", said)
    return found[1] if found else None


def _machine() -> str:
    """The same for all emulated nodes of one machine; by name where the kernel gives no number."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Whether torch could find anything but the CPU to compute on here, told without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# NVIDIA (on a Jetson; under Windows), AMD, and the accelerators that torch has plug-ins for.
_COMPUTES = re.compile(r"nvidia\d+|nvmap|dxg|kfd|accel|davinci\d+|hl\d+|cambricon_dev\d+")


def is_cpu_only(torch_version: str, device_names: Iterable[str]) -> bool:
    """From the version pip knows and the names in /dev. In doubt no: the CPU is what nobody with a GPU wants to get."""
    build = torch_version.partition("+")[2]
    if build in ("cpu", "xpu"):
        # Intel's GPUs have no device of their own name: every laptop's graphics look like them.
        return build == "cpu"
    return not any(_COMPUTES.fullmatch(name) for name in device_names)


def this_machine_is_cpu_only() -> bool:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    return is_cpu_only(torch_version, (path.name for path in Path("/dev").iterdir()))

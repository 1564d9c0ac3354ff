"""Collect facts of GPUs: cards, drivers, torch's build, and the variables that CUDA, ROCm and NCCL read.

Found without lspci and without importing torch, so that a machine where nothing is installed can be examined too.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from shoal.host.proc import read_text

_PCI = Path("/sys/bus/pci/devices")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
# PCI classes: display controllers, and accelerators without a display.
_GPU_CLASSES = ("0x03", "0x12")
# The answer of all topics is waited for ten seconds. A broken card can keep nvidia-smi busy for minutes.
_SMI_TIMEOUT_S = 4.0
_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_mode")
_VARIABLE = re.compile(r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|NCCL_[A-Z_]+|RCCL_[A-Z_]+")


def observe(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "pci": pci_gpus(),
        "nvidia": nvidia(),
        "amd": amd(),
        "torch": torch_build(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLE.fullmatch(name)},
        "shared_memory": shared_memory(),
        "adapters": sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else [],
    }


def pci_gpus(folder: Path = _PCI) -> dict[str, int]:
    """Count the graphics cards and accelerators on the bus by vendor, with or without a driver."""
    counts: dict[str, int] = {}
    for device in folder.iterdir() if folder.is_dir() else ():
        vendor = _VENDORS.get(read_text(device / "vendor"))
        if vendor and read_text(device / "class").startswith(_GPU_CLASSES):
            counts[vendor] = counts.get(vendor, 0) + 1
    return counts


def nvidia() -> dict[str, Any]:
    """Return the `driver`, the newest `cuda` that it supports, the `gpus`, and the `error` of nvidia-smi if it failed.

    Empty where there is no trace of a driver.
    """
    driver = parse_driver(read_text(_NVIDIA_DRIVER))
    if not (program := shutil.which("nvidia-smi")):
        return {"driver": driver, "cuda": None, "gpus": [], "error": "there is no nvidia-smi"} if driver else {}
    try:
        header = _run(program)
        query = _run(program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    except RuntimeError as error:
        return {"driver": driver, "cuda": None, "gpus": [], "error": str(error)}
    version, cuda = parse_header(header)
    return {"driver": driver or version, "cuda": cuda, "gpus": parse_gpus(query), "error": ""}


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi did not answer within {_SMI_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise RuntimeError(f"nvidia-smi does not start: {error.strerror}") from None
    # It writes its errors to stdout.
    if done.returncode or not done.stdout.strip():
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(lines[0].strip() if lines else f"nvidia-smi ended with exit code {done.returncode}")
    return done.stdout


def parse_driver(text: str) -> str | None:
    """Return the version in /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module\D.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return match[1] if match else None


def parse_header(text: str) -> tuple[str | None, str | None]:
    """Return the driver's version and its newest CUDA; drivers from 595 on call them KMD and CUDA UMD Version."""
    driver = re.search(r"(?:Driver|KMD) Version\s*:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)
    return driver[1] if driver else None, cuda[1] if cuda else None


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Return the cards of `nvidia-smi --query-gpu`; bytes are None where it reports none (`[N/A]`)."""
    gpus: list[dict[str, Any]] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_QUERY):
            index, uuid, name, total, free, mode = (cell.strip() for cell in row)
            memory = {"total": _mebibytes(total), "free": _mebibytes(free)}
            gpus.append({"index": int(index), "uuid": uuid, "name": name, **memory, "mode": mode})
    return gpus


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def amd(nodes: Path = _KFD_NODES) -> dict[str, Any]:
    """Return the `gpus` that the kernel's ROCm driver (/dev/kfd) offers; empty without that driver."""
    gpus: list[dict[str, Any]] = []
    for node in sorted(nodes.iterdir(), key=lambda path: path.name.zfill(4)) if nodes.is_dir() else ():
        words = (line.split() for line in read_text(node / "properties").splitlines())
        fields = {pair[0]: pair[1] for pair in words if len(pair) == 2}
        if fields.get("simd_count", "0") != "0":
            banks = [bank / "properties" for bank in (node / "mem_banks").glob("*")]
            sizes = [re.search(r"size_in_bytes (\d+)", read_text(bank)) for bank in banks]
            memory = sum(int(size[1]) for size in sizes if size)
            gpus.append({"index": len(gpus), "name": f"AMD GPU {_gfx_name(fields)}".strip(), "total": memory})
    driver = read_text("/sys/module/amdgpu/version") or None
    return {"driver": driver, "gpus": gpus, "may_open": os.access("/dev/kfd", os.R_OK | os.W_OK)} if gpus else {}


def _gfx_name(fields: dict[str, str]) -> str:
    """Return the architecture as ROCm writes it: 90402 is `gfx942`. The kernel often knows no product name."""
    version = int(fields.get("gfx_target_version", "0"))
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def torch_build(folder: Path | None = None) -> dict[str, str | None]:
    """Read torch's `version`, and the `cuda` or `hip` it was built for, from its files; empty without torch."""
    if folder is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec("torch")
            folder = Path(spec.origin).parent if spec and spec.origin else None
    text = read_text(folder / "version.py") if folder else ""
    pattern = r"^(__version__|cuda|hip)\b[^=\n]*= ['\"]([^'\"]+)['\"]"
    fields = {name.strip("_"): value for name, value in re.findall(pattern, text, re.MULTILINE)}
    return {"cuda": None, "hip": None, **fields} if "version" in fields else {}


def shared_memory() -> dict[str, int]:
    try:
        state = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return {}
    return {"total": state.f_blocks * state.f_frsize, "free": state.f_bavail * state.f_frsize}

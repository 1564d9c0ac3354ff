"""Runs on a host: print facts about this Python and this machine, and what shoal has put here before.

Standard library only, and nothing of shoal: the text of this file is sent to the host, which may have no shoal yet.
"""

from __future__ import annotations

import array
import fcntl
import importlib.metadata
import importlib.util
import ipaddress
import json
import platform
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import Any

NOTE = ".shoal-project.json"
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
_BUFFER_BYTES = 128 * _ENTRY_BYTES


def look(request: dict[str, Any], origin: str) -> dict[str, Any]:
    folder = Path(request["folder"]).expanduser().resolve()
    return {
        "python": {"origin": origin, **python_facts(request["packages"])},
        "folder": str(folder),
        "free_bytes": free_bytes(folder),
        "arch": platform.machine(),
        "os": platform.system(),
        "host_name": socket.gethostname(),
        "interfaces": interfaces(),
        "link_mbps": link_speeds(),
        "has_nvidia": Path("/proc/driver/nvidia").exists(),
        **holdings(folder, request),
    }


def python_facts(packages: list[str]) -> dict[str, Any]:
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "packages": versions,
        # Debian ships these as a separate package.
        "has_venv": all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip")),
    }


def holdings(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what shoal has put here. A file with its final name is complete; its size is compared all the same."""
    project = read_note(folder / "projects" / request["project"] / NOTE) if request["project"] else {}
    return {
        "has_code": (folder / "code" / request["code"]).is_dir(),
        "files": [name for name, size in request["files"].items() if size_of(folder / "data" / name) == size],
        "project_digest": project.get("digest", ""),
        # Needed only to find what must be sent.
        "project_files": project.get("files", {}) if project.get("digest") != request["project_digest"] else {},
    }


def read_note(path: Path) -> dict[str, Any]:
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that the folder is on, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface; none on systems other than Linux, where no rank can be started."""
    if sys.platform != "linux":
        return {}
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in [*_ipv4(), *_ipv6()]:
        addresses.setdefault(name.partition(":")[0], []).append(address)
    return addresses


def _ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_BUFFER_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", _BUFFER_BYTES, buffer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    entries = (buffer[start : start + _ENTRY_BYTES].tobytes() for start in range(0, length, _ENTRY_BYTES))
    return [(entry[:16].split(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [(line.split()[5], str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))) for line in lines]


def link_speeds() -> dict[str, int]:
    """Return the speeds that network cards report; virtual interfaces and loopback report none."""
    speeds = {}
    for _, name in socket.if_nameindex():
        try:
            speeds[name] = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return {name: speed for name, speed in speeds.items() if speed > 0}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(json.loads(sys.argv[1]), sys.argv[2])) + "\n")

"""Runs on a host: print facts about this Python and this machine, and what shoal has put here before.

Standard library only: the text of this file is sent to the host, which may have no shoal yet, together with that of the
one module of shoal that it imports.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

from shoal.host.network import interface_addresses, link_mbps

NOTE = ".shoal-project.json"


def look(request: dict[str, Any], origin: str) -> dict[str, Any]:
    folder = Path(request["folder"]).expanduser().resolve()
    # No rank can be started on other systems.
    interfaces = interface_addresses() if sys.platform == "linux" else {}
    return {
        "python": {"origin": origin, **python_facts(request["packages"])},
        "folder": str(folder),
        "arch": platform.machine(),
        "os": platform.system(),
        "interfaces": interfaces,
        "link_mbps": {name: mbps for name in interfaces if (mbps := link_mbps(name))},
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(json.loads(sys.argv[1]), sys.argv[2])) + "\n")

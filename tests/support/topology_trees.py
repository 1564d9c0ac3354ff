"""Files of /sys and /proc of several kinds of machines, in the form in which their kernels write them.

`cloud_vm` was read off a machine; the others were written for processors of these names.
A line of a `.tree` file is `PATH = CONTENT`; `cpu{0,8}` in a path stands for several, and `\\n` begins a new line.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.host.proc import parse_cpu_list
from shoal.host.topology import Topology, read_topology

_FOLDER = Path(__file__).parent / "topologies"
MACHINES = sorted(path.stem for path in _FOLDER.glob("*.tree"))


def write_tree(machine: str, root: Path) -> set[int]:
    """Write the files of a machine below `root`; return its hardware threads."""
    cpus: set[int] = set()
    for line in (_FOLDER / f"{machine}.tree").read_text(encoding="utf-8").splitlines():
        path, equals, content = line.partition(" = ")
        if not equals or line.startswith("#"):
            continue
        before, braces, rest = path.partition("{")
        numbers, _, after = rest.partition("}")
        for name in [f"{before}{cpu}{after}" for cpu in sorted(parse_cpu_list(numbers))] if braces else [path]:
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.encode().decode("unicode_escape") + "\n", encoding="utf-8")
            cpus |= {int(number) for number in re.findall(r"system/cpu/cpu(\d+)/", name)}
    return cpus or parse_cpu_list((root / "sys/devices/system/cpu/online").read_text(encoding="utf-8"))


def machine_topology(machine: str, root: Path, affinity: set[int] | None = None) -> Topology:
    """Read the topology of a machine, for a process that may use these of its hardware threads; None: all."""
    cpus = write_tree(machine, root)
    return read_topology(root / "sys", root / "proc", cpus if affinity is None else affinity)

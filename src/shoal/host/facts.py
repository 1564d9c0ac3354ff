"""What this machine is, as its peers need to know it before they train together. Torch-free and quick."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from shoal.errors import UsageError


def physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core share its arithmetic, so they count once."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


@cache
def cpu_name() -> str:
    """`platform.processor()` is empty on most Linux machines, and /proc/cpuinfo names an ARM core only by number."""
    try:
        listing = subprocess.run(["/usr/bin/lscpu", "--json"], capture_output=True, timeout=5, check=True).stdout
        fields = {entry["field"]: entry["data"] for entry in json.loads(listing)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return platform.processor() or platform.machine()


def has_avx2() -> bool | None:
    """None where the question makes no sense: only x86 has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), None)
    return None if flags is None else "avx2" in flags.split()


def installed(package: str) -> str:
    """A package's version without importing it; a build's local tag (`+cpu`) says nothing about agreement."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def boot_clock() -> float:
    """Seconds that go on while the machine sleeps; CLOCK_MONOTONIC stands still then."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# SECTION control/devices
# Whether torch could find anything but the CPU to compute on here, told without importing it.


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


# SECTION control/cores
# Which cores a rank computes on: the machine's topology as the kernel tells it, and the deal. Torch-free.
#
# Ranks that share a machine each get physical cores of their own, fast ones first, never more than this process may use
# already: what `taskset`, a container or a batch system has set stays in force.


_CPUS = Path("/sys/devices/system/cpu")
# Intel names its fast cores in a list, ARM gives every core a number.
_FAST_CPUS = Path("/sys/devices/cpu_core/cpus")


@dataclass(frozen=True)
class Core:
    """A physical core by its hardware threads, as far as we may use them. `speed` is relative to the other cores."""

    cpus: tuple[int, ...]
    speed: int = 1


def deal_cores(cores: Sequence[Core], slot: int, ranks: int, threads: int) -> tuple[int, ...] | None:
    """The hardware threads for rank `slot` of the `ranks` on this machine; None where pinning cannot help.

    That is where ranks want more cores than there are (the scheduler shares them more fairly than we could), and where
    one rank has all of them anyway. A rank gets both hardware threads of a core: the second one is for its
    communication, which would otherwise interrupt the first.
    """
    if ranks * threads > len(cores) or threads == len(cores):
        return None
    # Stable, so that neighbours, which often share a cache, stay together.
    by_speed = sorted(cores, key=lambda core: -core.speed)
    mine = by_speed[slot * threads : (slot + 1) * threads]
    return tuple(sorted(cpu for core in mine for cpu in core.cpus))


def usable_cores() -> list[Core]:
    """In the order of their numbers; none where the system does not tell (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    fast = read_cpu_list(_read(_FAST_CPUS))
    siblings = {cpu: read_cpu_list(_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")) or {cpu} for cpu in usable}
    groups = sorted({tuple(sorted(siblings[cpu] & usable)) for cpu in usable})
    return [Core(group, _speed(group[0], fast)) for group in groups]


def read_cpu_list(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it; nothing for what it is not."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _speed(cpu: int, fast: set[int]) -> int:
    if fast:
        return int(cpu in fast)
    capacity = _read(_CPUS / f"cpu{cpu}/cpu_capacity").strip()
    return int(capacity) if capacity.isdigit() else 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


# SECTION control/route
# Which of our addresses and interfaces leads to a peer, as the kernel's routing table has it.


def source_address(peer: str) -> str:
    """Our own address on the route to `peer`. Connecting a UDP socket picks the route and sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address


def dial_order(address: str) -> tuple[int, int]:
    """Of two machines the higher one dials the lower one: gloo does so, whatever their ranks (torch 2.13, both ways
    tried behind a firewall), and so do agents, so that only one direction must be open. Names are all alike."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return 0, 0
    return number.version, int(number)


def interface_of(address: str) -> str | None:
    """The interface that carries one of our addresses, for `GLOO_SOCKET_IFNAME`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def interface_to(peer: str) -> str | None:
    """None when the peer's name does not resolve or there is no route: the caller then leaves the choice to gloo."""
    try:
        return interface_of(source_address(socket.gethostbyname(peer)))
    except OSError:
        return None


def link_mbps(interface: str | None) -> int | None:
    """The card's own word on its speed; virtual interfaces and loopback have none."""
    stats = psutil.net_if_stats().get(interface or "")
    return stats.speed if stats and stats.speed > 0 else None


def interface_for(address: str, wanted: str | None, node: str) -> str:
    """By which this machine, called `node`, talks to its peers; a wrong one is named with the right ones."""
    here = psutil.net_if_addrs()
    if wanted is not None and wanted not in here:
        raise UsageError(
            f"{node} has no interface {wanted!r}",
            why=f"it has {_listing()}",
            fix="name one of these, or leave the interface out: it is found by the address",
        )
    found = wanted or interface_of(address)
    if found is None or not can_listen(address):
        raise UsageError(
            f"the address {address} is not one of {node}'s",
            why=f"it has {_listing()}",
            fix="name the address by which the other machines reach it",
        )
    return found


def can_listen(address: str) -> bool:
    """The kernel's own word: on loopback it takes addresses that no interface lists."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _listing() -> str:
    pairs = [
        f"{name} ({entry.address})"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
    ]
    return ", ".join(pairs) or "no interface with an address"

"""Facts about this machine that its peers need before they train together: versions, clock, its address. Its cores are
in `topology`, its interfaces in `network`.

Torch-free, quick, and standard library only: the collector of `shoal doctor` uses this module on machines where nothing
is installed.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import platform
import re
import shlex
import socket
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from shoal.errors import UsageError
from shoal.host.network import family_of, interface_addresses
from shoal.host.proc import command_output, interface_counters, read_cpuinfo, read_text

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Device names of NVIDIA (also on a Jetson and under Windows), AMD, and the accelerators that torch has plug-ins for.
_ACCELERATOR = re.compile(r"nvidia\d+|nvmap|dxg|kfd|accel|davinci\d+|hl\d+|cambricon_dev\d+")


# Processor


@cache
def cpu_name() -> str:
    """Return the processor's name from lscpu: /proc/cpuinfo names an ARM core only by number."""
    try:
        entries = json.loads(command_output(["lscpu", "--json"]))["lscpu"]
        return str({entry["field"]: entry["data"] for entry in entries}["Model name:"])
    except (ValueError, KeyError, TypeError):
        return read_cpuinfo("model name") or platform.processor() or platform.machine()


def has_avx2() -> bool | None:
    """Return None on processors other than x86, which have no such flag."""
    flags = read_cpuinfo("flags")
    return "avx2" in flags.split() if flags else None


def is_cpu_only(torch_version: str, device_names: Iterable[str]) -> bool:
    """Tell from torch's version and the names in /dev whether only the CPU can compute. Return False in doubt: a user
    with a GPU does not want the CPU to be chosen."""
    build = torch_version.partition("+")[2]
    if build in ("cpu", "xpu"):
        # Intel GPUs have no device name of their own: the graphics of every laptop look like them.
        return build == "cpu"
    return not any(_ACCELERATOR.fullmatch(name) for name in device_names)


def this_machine_is_cpu_only() -> bool:
    return is_cpu_only(installed_version("torch") or "", (path.name for path in Path("/dev").iterdir()))


# The newest builds of torch for GPUs by the CUDA of the driver, which runs any build of the same major version; torch
# 2.13 has these. scripts/bootstrap has them too.
_CUDA_BUILDS = {13: "cu130", 12: "cu126"}
ROCM_BUILD = "rocm7.2"


def cuda_build(driver_cuda: str | None) -> str | None:
    """Return the build of torch for a driver that supports CUDA up to this version; None if it is too old for any."""
    major = int((driver_cuda or "13.0").partition(".")[0])
    return next((build for least, build in _CUDA_BUILDS.items() if major >= least), None)


def torch_install_command(python: str, release: str | None, build: str) -> str:
    """Return the command that installs this build of torch beside the other packages of an environment."""
    torch = f"torch=={release}+{build}" if release else "torch"
    return f"{shlex.quote(python)} -m pip install {torch} --index-url https://download.pytorch.org/whl/{build}"


# Versions, identity and clock


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def public_version(version: str) -> str:
    """Return `2.13.0` for `2.13.0+cpu`: builds of one release agree with each other."""
    return version.partition("+")[0]


def installed_release(package: str) -> str:
    """Return a package's public version, or "none"."""
    return public_version(installed_version(package) or "none")


def boot_id() -> str | None:
    """Identify the running kernel. All emulated nodes of a machine share it, as they share its cores."""
    return read_text(_BOOT_ID) or None


def boot_clock() -> float:
    """Return seconds that also count while the machine sleeps; CLOCK_MONOTONIC stands still then."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# Addresses and interfaces


def source_address(peer: str) -> str:
    """Return the own address on the route to `peer`. Connecting a UDP socket picks the route and sends nothing."""
    with socket.socket(family_of(peer), socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address


def dial_priority(address: str) -> tuple[int, int]:
    """Return a sort key: of two machines the one with the higher address connects to the lower one.

    gloo does so whatever the ranks are (torch 2.13, tried in both directions behind a firewall), and agents do the
    same, so that only one direction must be open. All host names are equal.
    """
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return 0, 0
    return number.version, int(number)


def interface_of(address: str) -> str | None:
    """Return the interface that carries one of this machine's addresses, for `GLOO_SOCKET_IFNAME`."""
    return next((name for name, addresses in interface_addresses().items() if address in addresses), None)


def interface_to(peer: str) -> str | None:
    """Return None when the peer's name does not resolve or there is no route: the caller leaves the choice to gloo."""
    try:
        return interface_of(source_address(socket.gethostbyname(peer)))
    except OSError:
        return None


def interface_for(address: str, wanted: str | None, node: str) -> str:
    """Return the interface by which this machine, called `node`, reaches its peers: `wanted`, or the one with the
    address. Raise `UsageError` where this machine has not both."""
    addresses = interface_addresses()
    pairs = (f"{name} ({own})" for name, owned in addresses.items() for own in owned if not own.startswith("fe80"))
    has = f"it has {', '.join(pairs) or 'no interface with an address'}"
    if wanted is not None and wanted not in addresses:
        raise UsageError(
            f"{node} has no interface {wanted!r}",
            why=has,
            fix="name one of these, or leave the interface out: it is found by the address",
        )
    interface = wanted or interface_of(address)
    if interface is None or not can_listen(address):
        raise UsageError(
            f"the address {address} is not one of {node}'s",
            why=has,
            fix="name the address by which the other machines reach it",
        )
    return interface


def can_listen(address: str) -> bool:
    """Try to bind the address: on loopback the kernel accepts addresses that no interface lists."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class WireCounter:
    """Counts the bytes that this node sends over the interface of the ranks, by the kernel's own counter."""

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._last = self._read()

    def since_last(self) -> int | None:
        now = self._read()
        sent = None if now is None or self._last is None else now - self._last
        self._last = now
        return sent

    def _read(self) -> int | None:
        return next((int(words[8]) for name, words in interface_counters() if name == self._interface), None)

"""Which of our addresses and interfaces leads to a peer, as the kernel's routing table has it."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from shoal.errors import UsageError


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

"""Interfaces, the way to each peer, and what may stand in it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from shoal.net.scout import card, firewall, netlink

_SYS = Path("/sys/class/net")
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_HOSTS = Path("/etc/hosts")
# By their names, since many of these are plain bridges, tunnels or pairs to the kernel.
_NAMED = (
    ("docker", re.compile(r"docker|br-[0-9a-f]{12}|podman|cni|flannel|cali|lxc|lxd|virbr|vmnet|vboxnet")),
    ("tailscale", re.compile(r"tailscale|zt[0-9a-z]{8}")),
    ("vpn", re.compile(r"wg\d|tun\d|tap\d|ppp\d|nordlynx|proton|utun")),
)
_TYPED = {
    "bridge": "bridge",
    "wireguard": "vpn",
    "tun": "vpn",
    "gre": "vpn",
    "gretap": "vpn",
    "ipip": "vpn",
    "sit": "vpn",
    "vxlan": "vpn",
    "dummy": "virtual",
    "ifb": "virtual",
}


def observe(request: dict[str, Any]) -> dict[str, Any]:
    links = netlink.links()
    addresses = netlink.addresses()
    names = {link["index"]: link["name"] for link in links}
    host_name = socket.gethostname()
    return {
        "interfaces": {
            link["name"]: _interface(link, [address for index, address in addresses if index == link["index"]])
            for link in links
        },
        "routes": {peer: _route(peer, names) for peer in request.get("peers", [])},
        "firewall": firewall.observe(),
        "host_name": host_name,
        "hosts_file": in_hosts_file(host_name, _read(_HOSTS)),
        "port_range": [int(word) for word in _read(_PORT_RANGE).split()],
    }


def kind_of(name: str, kernel_type: str, is_wifi: bool) -> str:
    """In a person's words. Pairs (veth) are how containers and emulated nodes are wired."""
    if name == "lo":
        return "loopback"
    named = next((kind for kind, pattern in _NAMED if pattern.match(name)), None)
    return named or ("wifi" if is_wifi else _TYPED.get(kernel_type, "wired"))


def in_hosts_file(name: str, text: str) -> list[str]:
    """What /etc/hosts says about a name, without asking anybody else."""
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    return [line[0] for line in words if name in line[1:]]


def _interface(link: dict[str, Any], addresses: list[str]) -> dict[str, Any]:
    name = link["name"]
    is_wifi = any((_SYS / name / mark).exists() for mark in ("wireless", "phy80211"))
    found = {
        "kind": kind_of(name, link["type"], is_wifi),
        "addresses": addresses,
        **{key: link[key] for key in ("mac", "mtu", "up", "carrier")},
    }
    if not link["type"] and name != "lo":
        # Of virtual ones the figure is made up: a pair says 10 Gbit/s, whatever shapes it.
        found |= card.link_settings(name)
    if is_wifi:
        found["power_save"] = card.power_save(name)
    return found


def _route(peer: str, names: dict[int, str]) -> dict[str, Any]:
    try:
        way = netlink.route(peer)
    except OSError as error:
        return {"error": error.strerror}
    return {"interface": names.get(way["index"], ""), **{key: way[key] for key in ("source", "gateway", "local")}}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

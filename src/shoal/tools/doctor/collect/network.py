"""Collect facts of the network: interfaces, the route to each peer, firewall rules, names and how they resolve.

Links, addresses, routes and neighbours are read over netlink. That needs no tool and no privilege, and is right inside
a network namespace, where /sys may show the interfaces of another one.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.host.proc import read_text

_SYS = Path("/sys/class/net")
# Recognised by name, because many of these are plain bridges, tunnels or veth pairs to the kernel.
_KINDS_BY_NAME = (
    ("docker", re.compile(r"docker|br-[0-9a-f]{12}|podman|cni|flannel|cali|lxc|lxd|virbr|vmnet|vboxnet")),
    ("tailscale", re.compile(r"tailscale|zt[0-9a-z]{8}")),
    ("vpn", re.compile(r"wg\d|tun\d|tap\d|ppp\d|nordlynx|proton|utun")),
)
_KINDS_BY_TYPE = {
    "bridge": "bridge",
    **dict.fromkeys(("wireguard", "tun", "gre", "gretap", "ipip", "sit", "vxlan"), "vpn"),
    **dict.fromkeys(("dummy", "ifb"), "virtual"),
}


def observe(request: dict[str, Any]) -> dict[str, Any]:
    interfaces = links()
    interface_addresses = addresses()
    names = {link["index"]: link["name"] for link in interfaces}
    host_name = socket.gethostname()
    return {
        "interfaces": {
            link["name"]: _interface(
                link, [address for index, address in interface_addresses if index == link["index"]]
            )
            for link in interfaces
        },
        "routes": {peer: _route(peer, names) for peer in request.get("peers", [])},
        "firewall": firewall(),
        "host_name": host_name,
        "hosts_file": hosts_file_addresses(read_text("/etc/hosts"), host_name),
        "port_range": [int(word) for word in read_text("/proc/sys/net/ipv4/ip_local_port_range").split()],
    }


def _interface(link: dict[str, Any], addresses: list[str]) -> dict[str, Any]:
    name = link["name"]
    is_wifi = any((_SYS / name / mark).exists() for mark in ("wireless", "phy80211"))
    facts = {
        "kind": kind_of(name, link["type"], is_wifi),
        "addresses": addresses,
        **{key: link[key] for key in ("mac", "mtu", "up", "carrier")},
    }
    if not link["type"] and name != "lo":
        # Virtual interfaces report a fixed figure: a veth pair says 10 Gbit/s, however it is shaped.
        facts |= link_settings(name)
    if is_wifi:
        facts["power_save"] = power_save(name)
    return facts


def kind_of(name: str, kernel_type: str, is_wifi: bool) -> str:
    """Return wired for veth pairs too: containers and emulated nodes are connected by them."""
    if name == "lo":
        return "loopback"
    named = next((kind for kind, pattern in _KINDS_BY_NAME if pattern.match(name)), None)
    return named or ("wifi" if is_wifi else _KINDS_BY_TYPE.get(kernel_type, "wired"))


def _route(peer: str, names: dict[int, str]) -> dict[str, Any]:
    try:
        path = route(peer)
    except OSError as error:
        return {"error": error.strerror}
    return {"interface": names.get(path["index"], ""), **{key: path[key] for key in ("source", "gateway", "local")}}


# Names.

# For all look-ups together, which run in parallel: a dead name server keeps each of them waiting for 5 s or more.
_LOOKUPS_TIMEOUT_S = 3.5


def observe_names(request: dict[str, Any]) -> dict[str, Any]:
    own = socket.gethostname()
    peers = [address for address in (request.get("address"), *request.get("peers", [])) if address]
    questions: dict[str, Callable[[], Any]] = {f"name of {address}": _reverse_lookup(address) for address in peers}
    answers = ask_all({"own": lambda: resolve(own), **questions}, _LOOKUPS_TIMEOUT_S)
    means = answers["own"].get("answer", [])
    return {
        "host_name": own,
        "means": means,
        "took_s": answers["own"]["took_s"],
        "published": published(means),
        "reverse": {address: answers[f"name of {address}"] for address in peers},
        "in_hosts_file": hosts_file_addresses(read_text("/etc/hosts"), own),
        "sources": host_sources(read_text("/etc/nsswitch.conf")),
    }


def ask_all(questions: dict[str, Callable[[], Any]], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Ask each question in a thread, since a look-up has no timeout. `took_s` is None for one that still waits."""
    answers: dict[str, dict[str, Any]] = {name: {"took_s": None} for name in questions}

    def ask(name: str) -> None:
        began = time.monotonic()
        answer = questions[name]()
        answers[name] = {"took_s": time.monotonic() - began, "answer": answer}

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, in the order in which gloo would get them."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def published(addresses: list[str]) -> str | None:
    """Return what gloo sends to its peers when no interface is named: the first address that this machine has."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return None


def _reverse_lookup(address: str) -> Callable[[], str]:
    """Look up the name of an address as torch does when a rank connects to its store.

    torch's sockets are for both families, so an IPv4 address is looked up as an IPv4-mapped IPv6 address. A plain line
    in /etc/hosts does not answer that (tested).
    """
    mapped = address if ":" in address else f"::ffff:{address}"

    def ask() -> str:
        try:
            return socket.getnameinfo((mapped, 0), socket.NI_NUMERICSERV)[0]
        except OSError:
            return address

    return ask


def hosts_file_addresses(text: str, name: str) -> list[str]:
    """Return the addresses of a name in /etc/hosts, without asking any other source."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if name in words[1:]]


def host_sources(text: str) -> list[str]:
    """Return the sources for host names in nsswitch.conf in their order, without the actions in brackets."""
    line = next((line for line in text.splitlines() if line.startswith("hosts:")), "")
    return [word for word in line.partition("#")[0].split()[1:] if not word.startswith("[") and not word.endswith("]")]


# Firewall.

_FIREWALL_TOOLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"
_COMMAND_TIMEOUT_S = 3.0


def firewall() -> dict[str, Any]:
    """Return the firewall as far as this user may see it.

    `chains` are those that incoming or outgoing packets pass and that may drop them; None where they cannot be listed.
    """
    search = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}"
    tools = {name: path for name in _FIREWALL_TOOLS if (path := shutil.which(name, path=search))}
    chains = None
    if "nft" in tools:
        with contextlib.suppress(ValueError):
            chains = blocking_chains(json.loads(_run([tools["nft"], "-j", "list", "ruleset"])))
    return {
        "tools": list(tools),
        "ufw": "ufw" in tools and "ENABLED=yes" in read_text("/etc/ufw/ufw.conf").splitlines(),
        "firewalld": "firewall-cmd" in tools and _run(["systemctl", "is-active", "firewalld"]).strip() == "active",
        "chains": chains,
    }


def blocking_chains(ruleset: dict[str, Any]) -> list[dict[str, str]]:
    """Return the chains of `nft -j list ruleset` that may drop packets, also by a jump to another chain."""
    entries = ruleset.get("nftables", [])
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    blocking = []
    for chain in (entry["chain"] for entry in entries if "chain" in entry):
        family, table, name = place = (chain["family"], chain["table"], chain["name"])
        own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        may_drop = chain.get("policy") == "drop" or any(_may_drop(rule) for rule in own)
        if chain.get("hook") in ("input", "output") and family in ("ip", "ip6", "inet") and may_drop:
            blocking.append({"family": family, "table": table, "name": name, "hook": chain["hook"]})
    return blocking


def _may_drop(rule: dict[str, Any]) -> bool:
    return any(key in ("drop", "reject", "jump", "goto", "vmap") for part in rule.get("expr", []) for key in part)


def _run(argv: list[str]) -> str:
    """Return a command's output; empty when it fails or times out."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# Netlink: message types, flags, structures and attributes of linux/rtnetlink.h.

_GET_LINK, _GET_ADDRESS, _GET_ROUTE, _GET_NEIGHBOUR = 18, 22, 26, 30
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ROUTE = struct.Struct("=8BI")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_LINK_MAC, _LINK_NAME, _LINK_MTU, _LINK_CARRIER, _LINK_INFO, _INFO_KIND = 1, 3, 4, 33, 18, 1
_ADDRESS_PEER, _ADDRESS_LOCAL = 1, 2
_ROUTE_TO, _ROUTE_INTERFACE, _ROUTE_GATEWAY, _ROUTE_SOURCE = 1, 4, 5, 7
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC = 1, 2
_IS_UP = 0x1
_TYPE_LOCAL = 2
_NETLINK_TIMEOUT_S = 2.0


def links() -> list[dict[str, Any]]:
    """Return all links.

    `type` is the kernel's name for virtual ones (bridge, veth, wireguard, …), empty for a card. `up`: switched on;
    `carrier`: plugged in.
    """
    result = []
    for body in _request(_GET_LINK, _DUMP, _LINK.pack(0, 0, 0, 0, 0)):
        _, _, index, flags, _ = _LINK.unpack_from(body)
        attributes = _attributes(body[_LINK.size :])
        result.append(
            {
                "index": index,
                "name": _text(attributes[_LINK_NAME]),
                "mac": attributes.get(_LINK_MAC, b"").hex(":"),
                "mtu": struct.unpack("=I", attributes[_LINK_MTU])[0],
                "up": bool(flags & _IS_UP),
                "carrier": attributes.get(_LINK_CARRIER) != b"\0",
                "type": _text(_attributes(attributes.get(_LINK_INFO, b"")).get(_INFO_KIND, b"")),
            }
        )
    return result


def addresses() -> list[tuple[int, str]]:
    """Return interface index and address (`10.77.0.1/24`), in the order in which programs see them."""
    result = []
    for body in _request(_GET_ADDRESS, _DUMP, _ADDRESS.pack(0, 0, 0, 0, 0)):
        _, prefix, _, _, index = _ADDRESS.unpack_from(body)
        attributes = _attributes(body[_ADDRESS.size :])
        packed = attributes.get(_ADDRESS_LOCAL) or attributes.get(_ADDRESS_PEER)
        if packed:
            result.append((index, f"{ipaddress.ip_address(packed)}/{prefix}"))
    return result


def route(peer: str) -> dict[str, Any]:
    """Return how a packet to `peer` would leave; raise OSError where there is no route. `local`: our own address."""
    packed = ipaddress.ip_address(peer).packed
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    target = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _ROUTE_TO) + packed
    (body,) = _request(_GET_ROUTE, 0, _ROUTE.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + target)
    kind, attributes = _ROUTE.unpack_from(body)[7], _attributes(body[_ROUTE.size :])
    return {
        "index": struct.unpack("=I", attributes[_ROUTE_INTERFACE])[0],
        "source": str(ipaddress.ip_address(attributes[_ROUTE_SOURCE])) if _ROUTE_SOURCE in attributes else "",
        "gateway": str(ipaddress.ip_address(attributes[_ROUTE_GATEWAY])) if _ROUTE_GATEWAY in attributes else "",
        "local": kind == _TYPE_LOCAL,
    }


def neighbours() -> dict[str, str]:
    """Return MAC addresses by network address, of machines on the same segment; empty while unanswered."""
    macs = {}
    for body in _request(_GET_NEIGHBOUR, _DUMP, _NEIGHBOUR.pack(0, 0, 0, 0, 0)):
        attributes = _attributes(body[_NEIGHBOUR.size :])
        if _NEIGHBOUR_ADDRESS in attributes:
            address = str(ipaddress.ip_address(attributes[_NEIGHBOUR_ADDRESS]))
            macs[address] = attributes.get(_NEIGHBOUR_MAC, b"").hex(":")
    return macs


def _request(kind: int, flags: int, payload: bytes) -> Iterator[bytes]:
    """Send one netlink request and yield the bodies of the answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_NETLINK_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(payload), kind, _REQUEST | flags, 1, 0) + payload)
        while True:
            block = kernel.recv(1 << 18)
            while len(block) >= _HEADER.size:
                length, answer_kind, _, _, _ = _HEADER.unpack_from(block)
                body, block = block[_HEADER.size : length], block[_aligned(length) :]
                if answer_kind == _ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise OSError(code, os.strerror(code))
                if answer_kind == _DONE:
                    return
                yield body
            if not flags & _DUMP:
                return


def _attributes(block: bytes) -> dict[int, bytes]:
    attributes = {}
    while len(block) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(block)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind & 0x3FFF] = block[_ATTRIBUTE.size : length]
        block = block[_aligned(length) :]
    return attributes


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


# Card settings, read with the ioctl calls that ethtool and iwconfig use.

_SIOCETHTOOL = 0x8946
_SIOCGIWPOWER = 0x8B2D
_LINK_SETTINGS = 0x4C
_SPEED_UNKNOWN = 0xFFFFFFFF
_DUPLEX = {0: "half", 1: "full"}
# Command, speed, duplex, six unused fields, and the number of words in each mask.
_SETTINGS = struct.Struct("=II7Bb")
_SETTINGS_BYTES = 48
_MOST_WORDS = 127
# The kernel's bits for link modes, by speed.
_MODES_MBPS = {
    10: (0, 1),
    100: (2, 3, 67),
    1000: (4, 5, 17, 41, 68),
    2500: (15, 47),
    5000: (48,),
    10_000: (12, 18, 19, 20, 42, 43, 44, 45, 46),
    25_000: (31, 32, 33),
    40_000: (23, 24, 25, 26),
    100_000: (36, 37, 38, 39),
}


def link_settings(name: str) -> dict[str, Any]:
    """Return speed and duplex of a card and what it and its partner can do; empty where the driver does not know."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            words = -_SETTINGS.unpack_from(_settings(control, name, 0))[-1]
            return read_settings(_settings(control, name, words)) if 0 < words <= _MOST_WORDS else {}
    except OSError:
        return {}


def read_settings(answer: bytes) -> dict[str, Any]:
    """Parse `ethtool_link_settings` and its masks: supported, advertised, advertised by the partner."""
    _, speed, duplex, *_, words = _SETTINGS.unpack_from(answer)
    masks = [int.from_bytes(answer[_SETTINGS_BYTES + 4 * words * i :][: 4 * words], "little") for i in range(3)]
    settings = {
        "speed_mbps": speed if speed not in (0, _SPEED_UNKNOWN) else None,
        "duplex": _DUPLEX.get(duplex),
        "best_mbps": _fastest(masks[0]),
        "partner_mbps": _fastest(masks[2]),
    }
    return {name: value for name, value in settings.items() if value}


def power_save(name: str) -> bool | None:
    """Tell whether a Wi-Fi card sleeps between packets; None where the driver does not know."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            answer = fcntl.ioctl(control, _SIOCGIWPOWER, struct.pack("16s16x", name.encode()))
    except OSError:
        return None
    return not struct.unpack_from("=iBB", answer, 16)[2]


def _settings(control: socket.socket, name: str, words: int) -> bytes:
    """Ask for the settings. Asked with 0 words, the kernel returns the length of its masks as a negative number."""
    buffer = array.array("B", bytes(_SETTINGS_BYTES + 3 * 4 * max(words, 0)))
    _SETTINGS.pack_into(buffer, 0, _LINK_SETTINGS, *[0] * 8, words)
    fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP", name.encode(), buffer.buffer_info()[0]).ljust(40, b"\0"))
    return buffer.tobytes()


def _fastest(mask: int) -> int | None:
    return max((mbps for mbps, bits in _MODES_MBPS.items() if any(mask >> bit & 1 for bit in bits)), default=None)

"""Interfaces, the way to each peer, and what may stand in it."""

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

from shoal.host.proc import read

# SECTION net/collector/netlink
# What the kernel knows of links, addresses, routes and neighbours, asked over netlink.
#
# It needs no tool and no right, and is true inside a network namespace, where /sys may show another one's interfaces.


_GET_LINK, _GET_ADDRESS, _GET_ROUTE, _GET_NEIGHBOUR = 18, 22, 26, 30
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ROUTE = struct.Struct("=8BI")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
# Attributes, by the messages they come in.
_LINK_MAC, _LINK_NAME, _LINK_MTU, _LINK_CARRIER, _LINK_INFO, _INFO_KIND = 1, 3, 4, 33, 18, 1
_ADDRESS_PEER, _ADDRESS_LOCAL = 1, 2
_ROUTE_TO, _ROUTE_INTERFACE, _ROUTE_GATEWAY, _ROUTE_SOURCE = 1, 4, 5, 7
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC = 1, 2
_IS_UP = 0x1
_TYPE_LOCAL = 2
_DEADLINE_S = 2.0

Attributes = dict[int, bytes]


def links() -> list[dict[str, Any]]:
    """`type` is the kernel's word for virtual ones (bridge, veth, wireguard, …), empty for a card. `up`: switched on;
    `carrier`: something is plugged in."""
    found = []
    for body in _ask(_GET_LINK, _DUMP, _LINK.pack(0, 0, 0, 0, 0)):
        _, _, index, flags, _ = _LINK.unpack_from(body)
        said = _attributes(body[_LINK.size :])
        found.append(
            {
                "index": index,
                "name": _text(said[_LINK_NAME]),
                "mac": said.get(_LINK_MAC, b"").hex(":"),
                "mtu": struct.unpack("=I", said[_LINK_MTU])[0],
                "up": bool(flags & _IS_UP),
                "carrier": said.get(_LINK_CARRIER) != b"\0",
                "type": _text(_attributes(said.get(_LINK_INFO, b"")).get(_INFO_KIND, b"")),
            }
        )
    return found


def addresses() -> list[tuple[int, str]]:
    """Index of the interface, and `10.77.0.1/24`; in the order in which programs find them."""
    found = []
    for body in _ask(_GET_ADDRESS, _DUMP, _ADDRESS.pack(0, 0, 0, 0, 0)):
        _, prefix, _, _, index = _ADDRESS.unpack_from(body)
        said = _attributes(body[_ADDRESS.size :])
        packed = said.get(_ADDRESS_LOCAL) or said.get(_ADDRESS_PEER)
        if packed:
            found.append((index, f"{ipaddress.ip_address(packed)}/{prefix}"))
    return found


def route(peer: str) -> dict[str, Any]:
    """How a packet to `peer` would leave; raises OSError where there is no way. `local`: it is our own address."""
    packed = ipaddress.ip_address(peer).packed
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    question = _ROUTE.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + _attribute(_ROUTE_TO, packed)
    (body,) = _ask(_GET_ROUTE, 0, question)
    kind, said = _ROUTE.unpack_from(body)[7], _attributes(body[_ROUTE.size :])
    return {
        "index": struct.unpack("=I", said[_ROUTE_INTERFACE])[0],
        "source": str(ipaddress.ip_address(said[_ROUTE_SOURCE])) if _ROUTE_SOURCE in said else "",
        "gateway": str(ipaddress.ip_address(said[_ROUTE_GATEWAY])) if _ROUTE_GATEWAY in said else "",
        "local": kind == _TYPE_LOCAL,
    }


def neighbours() -> dict[str, str]:
    """Hardware address by network address, of machines on the same wire; empty while nobody has answered for it."""
    found = {}
    for body in _ask(_GET_NEIGHBOUR, _DUMP, _NEIGHBOUR.pack(0, 0, 0, 0, 0)):
        said = _attributes(body[_NEIGHBOUR.size :])
        if _NEIGHBOUR_ADDRESS in said:
            found[str(ipaddress.ip_address(said[_NEIGHBOUR_ADDRESS]))] = said.get(_NEIGHBOUR_MAC, b"").hex(":")
    return found


def _ask(kind: int, flags: int, question: bytes) -> Iterator[bytes]:
    """The bodies of the answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_DEADLINE_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(question), kind, _REQUEST | flags, 1, 0) + question)
        while True:
            for said, body in _messages(kernel.recv(1 << 18)):
                if said == _ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise OSError(code, os.strerror(code))
                if said == _DONE:
                    return
                yield body
            if not flags & _DUMP:
                return


def _messages(block: bytes) -> Iterator[tuple[int, bytes]]:
    while len(block) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(block)
        yield kind, block[_HEADER.size : length]
        block = block[_aligned(length) :]


def _attributes(block: bytes) -> Attributes:
    found = {}
    while len(block) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(block)
        if length < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = block[_ATTRIBUTE.size : length]
        block = block[_aligned(length) :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


# SECTION net/collector/card
# What a network card says of itself: its speed now, and what it and its partner could do. Asked as ethtool asks.


_SIOCETHTOOL = 0x8946
_SIOCGIWPOWER = 0x8B2D
_LINK_SETTINGS = 0x4C
_SPEED_UNKNOWN = 0xFFFFFFFF
_DUPLEX = {0: "half", 1: "full"}
# Command, speed, duplex, six more that we do not need, and the words of each mask.
_SETTINGS = struct.Struct("=II7Bb")
_SETTINGS_BYTES = 48
_MOST_WORDS = 127
# The bits that the kernel gives to link modes, up to what a card at home or in an office can do.
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
    """Nothing where there is no card, or it does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            words = -_SETTINGS.unpack_from(_settings(asking, name, 0))[-1]
            return read_settings(_settings(asking, name, words)) if 0 < words <= _MOST_WORDS else {}
    except OSError:
        return {}


def read_settings(answer: bytes) -> dict[str, Any]:
    """From the kernel's `ethtool_link_settings`, followed by the masks of what is supported, offered, and offered by
    the partner."""
    _, speed, duplex, *_, words = _SETTINGS.unpack_from(answer)
    masks = [int.from_bytes(answer[_SETTINGS_BYTES + 4 * words * each :][: 4 * words], "little") for each in range(3)]
    found = {
        "speed_mbps": speed if speed not in (0, _SPEED_UNKNOWN) else None,
        "duplex": _DUPLEX.get(duplex),
        "best_mbps": _fastest(masks[0]),
        "partner_mbps": _fastest(masks[2]),
    }
    return {name: value for name, value in found.items() if value}


def power_save(name: str) -> bool | None:
    """Whether a Wi-Fi card sleeps between packets; None where it does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking, _SIOCGIWPOWER, struct.pack("16s16x", name.encode()))
    except OSError:
        return None
    return not struct.unpack_from("=iBB", answer, 16)[2]


def _settings(asking: socket.socket, name: str, words: int) -> bytes:
    """Asked with no words, the kernel says how many its masks have, as a negative number."""
    room = array.array("B", bytes(_SETTINGS_BYTES + 3 * 4 * max(words, 0)))
    _SETTINGS.pack_into(room, 0, _LINK_SETTINGS, *[0] * 8, words)
    fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP", name.encode(), room.buffer_info()[0]).ljust(40, b"\0"))
    return room.tobytes()


def _fastest(mask: int) -> int | None:
    return max((mbps for mbps, bits in _MODES_MBPS.items() if any(mask >> bit & 1 for bit in bits)), default=None)


# SECTION net/collector/firewall
# Which firewall stands on this machine, as far as whoever runs us may look.


_TOOLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"
_UFW_SETTINGS = Path("/etc/ufw/ufw.conf")
_WITHIN_S = 3.0


def firewall_observe() -> dict[str, Any]:
    """`chains`: those that incoming or outgoing packets pass and that may drop them; None where we may not look."""
    tools = {name: path for name in _TOOLS if (path := _find(name))}
    return {
        "tools": list(tools),
        "ufw": "ufw" in tools and _ufw_is_on(),
        "firewalld": "firewall-cmd" in tools and _says(["systemctl", "is-active", "firewalld"]).strip() == "active",
        "chains": _chains(tools["nft"]) if "nft" in tools else None,
    }


def blocking_chains(ruleset: dict[str, Any]) -> list[dict[str, str]]:
    """Of what `nft -j list ruleset` prints. A chain that hands on to others may find a drop there."""
    entries = ruleset.get("nftables", [])
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    found = []
    for chain in (entry["chain"] for entry in entries if "chain" in entry):
        family, table, name = place = (chain["family"], chain["table"], chain["name"])
        own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        blocks = chain.get("policy") == "drop" or any(_may_drop(rule) for rule in own)
        if chain.get("hook") in ("input", "output") and family in ("ip", "ip6", "inet") and blocks:
            found.append({"family": family, "table": table, "name": name, "hook": chain["hook"]})
    return found


def _may_drop(rule: dict[str, Any]) -> bool:
    return any(key in ("drop", "reject", "jump", "goto", "vmap") for part in rule.get("expr", []) for key in part)


def _chains(nft: str) -> list[dict[str, str]] | None:
    try:
        return blocking_chains(json.loads(_says([nft, "-j", "list", "ruleset"])))
    except ValueError:
        return None


def _ufw_is_on() -> bool:
    try:
        return "ENABLED=yes" in _UFW_SETTINGS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")


def _says(argv: list[str]) -> str:
    """Nothing when it fails, or takes its time."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_WITHIN_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


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
        "firewall": firewall_observe(),
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
        found |= link_settings(name)
    if is_wifi:
        found["power_save"] = power_save(name)
    return found


def _route(peer: str, names: dict[int, str]) -> dict[str, Any]:
    try:
        way = route(peer)
    except OSError as error:
        return {"error": error.strerror}
    return {"interface": names.get(way["index"], ""), **{key: way[key] for key in ("source", "gateway", "local")}}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# SECTION net/collector/names
# What this machine's name means here, and how long it takes to learn the names of its peers' addresses.


# For all look-ups together, which run side by side: a name server that is gone keeps each of them for 5 s and more.
DEADLINE_S = 3.5


def names_observe(request: dict[str, Any]) -> dict[str, Any]:
    own = socket.gethostname()
    addresses = [address for address in (request.get("address"), *request.get("peers", [])) if address]
    questions: dict[str, Callable[[], Any]] = {f"name of {address}": _asker(address) for address in addresses}
    answers = ask_all({"own": lambda: meaning_of(own), **questions}, DEADLINE_S)
    return {
        "host_name": own,
        "means": answers["own"].get("answer", []),
        "took_s": answers["own"]["took_s"],
        "published": published(answers["own"].get("answer", [])),
        "reverse": {address: answers[f"name of {address}"] for address in addresses},
        "in_hosts_file": hosts_file_addresses(read("/etc/hosts"), own),
        "sources": host_sources(read("/etc/nsswitch.conf")),
    }


def ask_all(questions: dict[str, Callable[[], Any]], deadline_s: float) -> dict[str, dict[str, Any]]:
    """Each in a thread, since no look-up can be told to hurry. `took_s` is None for one that is still waiting."""
    found: dict[str, dict[str, Any]] = {name: {"took_s": None} for name in questions}

    def ask(name: str) -> None:
        began = time.monotonic()
        answer = questions[name]()
        found[name] = {"took_s": time.monotonic() - began, "answer": answer}

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def meaning_of(name: str) -> list[str]:
    """In the order in which gloo would get them."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def published(addresses: list[str]) -> str | None:
    """What gloo tells its peers when no interface is named: the first address that is one of this machine's."""
    return next((address for address in addresses if _is_own(address)), None)


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _asker(address: str) -> Callable[[], str]:
    return lambda: name_of(address)


def name_of(address: str) -> str:
    """As torch asks when a rank connects to its store: its sockets are for both families, so an IPv4 address is looked
    for in the other one's dress, which a plain line in /etc/hosts does not answer (tried)."""
    dressed = address if ":" in address else f"::ffff:{address}"
    try:
        return socket.getnameinfo((dressed, 0), socket.NI_NUMERICSERV)[0]
    except OSError:
        return address


def hosts_file_addresses(text: str, name: str) -> list[str]:
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if name in words[1:]]


def host_sources(text: str) -> list[str]:
    """Who is asked for host names, in that order; what to do when one of them fails is left out."""
    line = next((line for line in text.splitlines() if line.startswith("hosts:")), "")
    return [word for word in line.partition("#")[0].split()[1:] if not word.startswith("[") and not word.endswith("]")]

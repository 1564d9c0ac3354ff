"""What the kernel knows of the network: interfaces, addresses, routes, neighbours, and the settings of cards.

Read over netlink and by ioctl. That needs no tool (an image of Python alone has no `ip`) and no privilege, and is right
inside a network namespace, where /sys may show the interfaces of another one.

Standard library only, and nothing of shoal: the text of this file is also sent to hosts that have no shoal yet, whose
Python may be an old one (see `cluster/hosts/facts.py`).
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of every interface of this machine, without zones such as `%eth0`."""
    names = {link["index"]: link["name"] for link in links()}
    by_interface: dict[str, list[str]] = {name: [] for name in names.values()}
    for index, address, label in addresses():
        # A second address may have a label of its own, such as eth0:1, by which gloo finds it.
        by_interface.setdefault(label or names.get(index, ""), []).append(address.partition("/")[0])
    return by_interface


def link_mbps(interface: str | None) -> int | None:
    """Return the speed that the network card reports; loopback and most virtual interfaces report none."""
    return link_settings(interface).get("speed_mbps") if interface else None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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
_ADDRESS_PEER, _ADDRESS_LOCAL, _ADDRESS_LABEL = 1, 2, 3
_ROUTE_TO, _ROUTE_INTERFACE, _ROUTE_SOURCE = 1, 4, 7
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


def addresses() -> list[tuple[int, str, str]]:
    """Return interface index, address (`10.77.0.1/24`) and label, in the order in which programs see them."""
    result = []
    for body in _request(_GET_ADDRESS, _DUMP, _ADDRESS.pack(0, 0, 0, 0, 0)):
        _, prefix, _, _, index = _ADDRESS.unpack_from(body)
        attributes = _attributes(body[_ADDRESS.size :])
        packed = attributes.get(_ADDRESS_LOCAL) or attributes.get(_ADDRESS_PEER)
        if packed:
            label = _text(attributes.get(_ADDRESS_LABEL, b""))
            result.append((index, f"{ipaddress.ip_address(packed)}/{prefix}", label))
    return result


def route(peer: str) -> dict[str, Any]:
    """Return how a packet to `peer` would leave; raise OSError where there is no route. `local`: its own address."""
    packed = ipaddress.ip_address(peer).packed
    target = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _ROUTE_TO) + packed
    (body,) = _request(_GET_ROUTE, 0, _ROUTE.pack(family_of(peer), len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + target)
    kind, attributes = _ROUTE.unpack_from(body)[7], _attributes(body[_ROUTE.size :])
    return {
        "index": struct.unpack("=I", attributes[_ROUTE_INTERFACE])[0],
        "source": str(ipaddress.ip_address(attributes[_ROUTE_SOURCE])) if _ROUTE_SOURCE in attributes else "",
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

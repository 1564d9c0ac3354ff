"""What the kernel knows of links, addresses, routes and neighbours, asked over netlink.

It needs no tool and no right, and is true inside a network namespace, where /sys may show another one's interfaces.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

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

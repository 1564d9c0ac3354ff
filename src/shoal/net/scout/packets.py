"""Single packets between two nodes: do they arrive, up to which size, and does the other side hear only answers?"""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any

from shoal.net.scout.trial import LISTENERS, Listener, family_of

# linux/in.h and linux/in6.h; Python does not name all of them.
_MTU: dict[int, tuple[int, int]] = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_DISCOVER: dict[int, tuple[int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 10),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23),
}
_DO = 2
# Headers of IP and UDP.
_OVERHEAD: dict[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}


def send(request: dict[str, Any]) -> dict[str, Any]:
    """Datagrams of these sizes, as whole packets that nobody may cut, to every place. `from_listener`: from the port
    that we listen at, so that a firewall which lets answers in takes what comes back for one."""
    own = LISTENERS[int(request["port"])]
    return {
        "told": [_send(own, place, request["tag"], bool(request.get("from_listener"))) for place in request["places"]]
    }


def hear(request: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the datagrams that came to a port, by sender and tag."""
    return {"heard": LISTENERS[int(request["port"])].heard}


def _send(own: Listener, place: dict[str, Any], tag: str, from_listener: bool) -> dict[str, Any]:
    """`path_mtu` where the kernel knows that a packet is too big: it is our interface's, or a router has told it."""
    said: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            speaker = own.udp if from_listener else stack.enter_context(_speaker(own, place))
            for size in place["sizes"]:
                said |= _send_one(speaker, place, f"{tag} {size} {own.name}", size)
    except OSError as error:
        said |= {"errno": error.errno, "error": error.strerror}
    return said


def _send_one(speaker: socket.socket, place: dict[str, Any], text: str, size: int) -> dict[str, Any]:
    try:
        speaker.sendto(text.encode().ljust(size - _OVERHEAD[speaker.family], b"\0"), (place["address"], place["port"]))
    except OSError as error:
        too_big = {"path_mtu": speaker.getsockopt(*_MTU[speaker.family])} if error.errno == errno.EMSGSIZE else {}
        return {"errno": error.errno, "error": error.strerror, **too_big}
    return {}


def _speaker(own: Listener, place: dict[str, Any]) -> socket.socket:
    """At a port of its own. Connected: only then does the kernel say what it knows of the way."""
    family = family_of(place["address"])
    speaker = socket.socket(family, socket.SOCK_DGRAM)
    speaker.bind((own.udp.getsockname()[0], 0))
    speaker.setsockopt(*_DISCOVER[family], _DO)
    speaker.connect((place["address"], int(place["port"])))
    return speaker

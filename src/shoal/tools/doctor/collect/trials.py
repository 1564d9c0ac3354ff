"""Tries between two nodes: one listens, the other dials. Who answers says its name: two may have one address."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.tools.doctor.collect import network

# A burst: long enough to tell 10, 100 and 1000 Mbit/s, short enough that nobody minds.
_BURST_S = 0.3
_BURST_BYTES = 16 << 20
# Little more than such a burst needs: what waits in a buffer when time is up still has to pass a slow link.
_BUFFER_BYTES = 256 << 10
_BURST_PATIENCE_S = 1.5
_PATIENCE_S = 5.0
_AT_ONCE = 32
_TRIES = 5
# What answers at a port may be anything: a name or two numbers are all that is read of it.
_LONGEST_LINE = 1000


class Listener:
    """TCP and UDP on the same port of one address. Whoever connects is told our name, and how fast we heard them."""

    def __init__(self, address: str, name: str, port: int) -> None:
        family = family_of(address)
        self.tcp = socket.create_server((address, port), family=family)
        self.port: int = self.tcp.getsockname()[1]
        self.udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self.udp.bind((address, self.port))
        except OSError:
            self.tcp.close()
            raise
        self.name = name
        self.heard: dict[str, dict[str, list[int]]] = {}
        threading.Thread(target=self._welcome, daemon=True).start()
        threading.Thread(target=self._note, daemon=True).start()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.tcp.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            connection.sendall(self.name.encode() + b"\n")
            connection.sendall("{} {}\n".format(*_swallow(connection)).encode())

    def _note(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                words = self.udp.recv(1 << 16).rstrip(b"\0").decode(errors="replace").split(" ", 2)
                if len(words) == 3 and words[1].isdigit():
                    self.heard.setdefault(words[2], {}).setdefault(words[0], []).append(int(words[1]))


LISTENERS: dict[int, Listener] = {}


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Again when the kernel's choice for TCP is taken for UDP."""
    why: str | None = ""
    for _ in range(_TRIES):
        try:
            listener = Listener(request["address"], request["name"], int(request["port"]))
        except OSError as error:
            why = error.strerror
        else:
            LISTENERS[listener.port] = listener
            return {"port": listener.port}
    return {"port": None, "why": why}


def dial(request: dict[str, Any]) -> dict[str, Any]:
    """Connects to every place at once and reads the name of who answers."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return {"tries": list(pool.map(lambda place: _dial(place, float(request["timeout_s"])), request["places"]))}


def burst(request: dict[str, Any]) -> dict[str, Any]:
    """Sends as much as goes in a moment, and asks the other side how fast it came; None when it never said."""
    try:
        count, took_s = _pour((request["address"], int(request["port"])))
    except (OSError, ValueError):
        return {"mbps": None}
    return {"mbps": 8e-6 * count / took_s if count else None}


def _pour(place: tuple[str, int]) -> tuple[int, float]:
    with socket.create_connection(place, timeout=_BURST_PATIENCE_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        answers = connection.makefile("rb")
        answers.readline(_LONGEST_LINE)
        sent, until = 0, time.monotonic() + _BURST_S
        while sent < _BURST_BYTES and time.monotonic() < until:
            sent += connection.send(bytes(1 << 16))
        connection.shutdown(socket.SHUT_WR)
        count, took_s = answers.readline(_LONGEST_LINE).split()
    return int(count), float(took_s)


def _swallow(connection: socket.socket) -> tuple[int, float]:
    """How many bytes came, less the first lot, and in which time after it."""
    count, began = 0, 0.0
    room = bytearray(1 << 18)
    while got := connection.recv_into(room):
        if began:
            count += got
        else:
            began = time.perf_counter()
    return count, time.perf_counter() - began


def _dial(place: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    address, port = place["address"], int(place["port"])
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    began = time.perf_counter()
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connect_s = time.perf_counter() - began
            name = connection.makefile("rb").readline(_LONGEST_LINE).decode(errors="replace").strip()
    except OSError as error:
        return {**_explain(error, where, address, timeout_s), "mac": _mac(address)}
    outcome = "ok" if name == place["expect"] else "stranger"
    said = {"outcome": outcome, "detail": f"{where} was answered by {name or 'nobody'}", "mac": _mac(address)}
    return {**said, "numbers": {"connect_s": connect_s}}


def _explain(error: OSError, where: str, address: str, timeout_s: float) -> dict[str, Any]:
    if isinstance(error, TimeoutError):
        if _mac(address) == "":
            return {"outcome": "unreachable", "detail": f"no machine on the wire answers for {address}"}
        return {"outcome": "timeout", "detail": f"no answer from {where} in {timeout_s:g} s"}
    if isinstance(error, ConnectionRefusedError):
        return {"outcome": "refused", "detail": f"{where} refused the connection"}
    kinds = {errno.EHOSTUNREACH: "unreachable", errno.ENETUNREACH: "no-route", errno.EPERM: "forbidden"}
    return {"outcome": kinds.get(error.errno or 0, "failed"), "detail": f"{where}: {error.strerror or error}"}


def _mac(address: str) -> str | None:
    """Of who answers for the address on our wire; empty when nobody does, None when it is further away."""
    with contextlib.suppress(OSError, AttributeError):
        return network.neighbours().get(address)
    return None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# SECTION net/collector/packets
# Single packets between two nodes: do they arrive, up to which size, and does the other side hear only answers?


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

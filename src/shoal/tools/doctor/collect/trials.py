"""Trials between two nodes: one listens, the other connects, sends bursts or single datagrams.

The listener answers with its name, because two machines may have the same address.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.host import network
from shoal.host.network import family_of

# A burst is long enough to distinguish 10, 100 and 1000 Mbit/s, and short enough to disturb no other traffic.
_BURST_S = 0.3
_BURST_BYTES = 16 << 20
# Little more than a burst needs: data left in the buffer at its end still has to pass a slow link.
_SEND_BUFFER_BYTES = 256 << 10
_BURST_TIMEOUT_S = 1.5
_CONNECTION_TIMEOUT_S = 5.0
_PARALLEL_DIALS = 32
_LISTEN_ATTEMPTS = 5
# Any program may answer at a port: read no more of it than a name or two numbers.
_LONGEST_LINE = 1000


class Listener:
    """Listen for TCP and UDP on the same port. Send each client the name of this node and the rate of its data."""

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
        self.received_sizes: dict[str, dict[str, list[int]]] = {}  # of datagrams, by sender and tag
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._receive, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.tcp.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_CONNECTION_TIMEOUT_S)
            connection.sendall(self.name.encode() + b"\n")
            connection.sendall("{} {}\n".format(*_measure_receiving(connection)).encode())

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                words = self.udp.recv(1 << 16).rstrip(b"\0").decode(errors="replace").split(" ", 2)
                if len(words) == 3 and words[1].isdigit():
                    tag, size, sender = words
                    self.received_sizes.setdefault(sender, {}).setdefault(tag, []).append(int(size))


LISTENERS: dict[int, Listener] = {}


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Open a listener. Retry, because the port that the kernel chooses for TCP may be taken for UDP."""
    reason: str | None = ""
    for _ in range(_LISTEN_ATTEMPTS):
        try:
            listener = Listener(request["address"], request["name"], int(request["port"]))
        except OSError as error:
            reason = error.strerror
        else:
            LISTENERS[listener.port] = listener
            return {"port": listener.port}
    return {"port": None, "why": reason}


def dial(request: dict[str, Any]) -> dict[str, Any]:
    """Connect to all places in parallel and read the name of the machine that answers."""
    timeout_s = float(request["timeout_s"])
    with ThreadPoolExecutor(max_workers=_PARALLEL_DIALS) as pool:
        return {"tries": list(pool.map(lambda place: _dial(place, timeout_s), request["places"]))}


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
    return {
        "outcome": "ok" if name == place["expect"] else "other-machine",
        "detail": f"{where} was answered by {name or 'a program without a name'}",
        "mac": _mac(address),
        "numbers": {"connect_s": connect_s},
    }


def _explain(error: OSError, where: str, address: str, timeout_s: float) -> dict[str, Any]:
    if isinstance(error, TimeoutError):
        if _mac(address) == "":
            return {"outcome": "unreachable", "detail": f"no machine on the network answers for {address}"}
        return {"outcome": "timeout", "detail": f"no answer from {where} in {timeout_s:g} s"}
    if isinstance(error, ConnectionRefusedError):
        return {"outcome": "refused", "detail": f"{where} refused the connection"}
    outcomes = {errno.EHOSTUNREACH: "unreachable", errno.ENETUNREACH: "no-route", errno.EPERM: "forbidden"}
    return {"outcome": outcomes.get(error.errno or 0, "failed"), "detail": f"{where}: {error.strerror or error}"}


def _mac(address: str) -> str | None:
    """Return the card that answers for the address on this segment; empty when none does, None when it is remote."""
    with contextlib.suppress(OSError, AttributeError):
        return network.neighbours().get(address)
    return None


def burst(request: dict[str, Any]) -> dict[str, Any]:
    """Send as much as possible for a moment and return the receiver's rate; None when it did not answer."""
    try:
        place = request["address"], int(request["port"])
        with socket.create_connection(place, timeout=_BURST_TIMEOUT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            answers = connection.makefile("rb")
            answers.readline(_LONGEST_LINE)
            sent, until = 0, time.monotonic() + _BURST_S
            while sent < _BURST_BYTES and time.monotonic() < until:
                sent += connection.send(bytes(1 << 16))
            connection.shutdown(socket.SHUT_WR)
            received_bytes, took_s = answers.readline(_LONGEST_LINE).split()
            mbps = 8e-6 * int(received_bytes) / float(took_s) if int(received_bytes) else None
    except (OSError, ValueError):
        return {"mbps": None}
    return {"mbps": mbps}


def _measure_receiving(connection: socket.socket) -> tuple[int, float]:
    """Return the bytes received after the first read, and the seconds since then."""
    count, began = 0, 0.0
    buffer = bytearray(1 << 18)
    while size := connection.recv_into(buffer):
        if began:
            count += size
        else:
            began = time.perf_counter()
    return count, time.perf_counter() - began


# Socket options of linux/in.h and linux/in6.h; Python does not name all of them.
_MTU: dict[int, tuple[int, int]] = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_MTU_DISCOVER: dict[int, tuple[int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 10),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23),
}
_DISCOVER_DO = 2
_HEADER_BYTES: dict[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP


def send(request: dict[str, Any]) -> dict[str, Any]:
    """Send datagrams of the given sizes, never fragmented, to every place; return what the kernel reported for each.

    `from_listener`: send from the port of the listener, so that a stateful firewall takes the peer's for answers.
    """
    listener, from_listener = LISTENERS[int(request["port"])], bool(request.get("from_listener"))
    return {"results": [_send(listener, place, request["tag"], from_listener) for place in request["places"]]}


def received(request: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the datagrams that arrived at a port, by sender and tag."""
    return {"sizes": LISTENERS[int(request["port"])].received_sizes}


def _send(listener: Listener, place: dict[str, Any], tag: str, from_listener: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            sender = listener.udp if from_listener else stack.enter_context(_connected_sender(listener, place))
            for size in place["sizes"]:
                result |= _send_one(sender, place, f"{tag} {size} {listener.name}", size)
    except OSError as error:
        result |= {"errno": error.errno, "error": error.strerror}
    return result


def _send_one(sender: socket.socket, place: dict[str, Any], text: str, size: int) -> dict[str, Any]:
    """Send one datagram. `path_mtu`: the kernel knows it is too large, from the interface here or from a router."""
    payload = text.encode().ljust(size - _HEADER_BYTES[sender.family], b"\0")
    try:
        sender.sendto(payload, (place["address"], place["port"]))
    except OSError as error:
        too_big = {"path_mtu": sender.getsockopt(*_MTU[sender.family])} if error.errno == errno.EMSGSIZE else {}
        return {"errno": error.errno, "error": error.strerror, **too_big}
    return {}


def _connected_sender(listener: Listener, place: dict[str, Any]) -> socket.socket:
    """Open a socket at its own port. Only for a connected one does the kernel report the path MTU."""
    family = family_of(place["address"])
    sender = socket.socket(family, socket.SOCK_DGRAM)
    sender.bind((listener.udp.getsockname()[0], 0))
    sender.setsockopt(*_MTU_DISCOVER[family], _DISCOVER_DO)
    sender.connect((place["address"], int(place["port"])))
    return sender

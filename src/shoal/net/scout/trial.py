"""Tries between two nodes: one listens, the other dials. Who answers says its name: two may have one address."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from typing import Any

_listeners: dict[int, Listener] = {}


class Listener:
    """TCP and UDP on the same port of one address. Whoever connects is told our name; datagrams are counted by size."""

    def __init__(self, address: str, name: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.tcp = socket.create_server((address, port), family=family)
        self.port: int = self.tcp.getsockname()[1]
        self.udp = socket.socket(family, socket.SOCK_DGRAM)
        self.udp.bind((address, self.port))
        self.name = name
        self.sizes: list[int] = []
        threading.Thread(target=self._welcome, daemon=True).start()
        threading.Thread(target=self._count, daemon=True).start()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.tcp.accept()
                with connection:
                    connection.sendall(self.name.encode() + b"\n")

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.sizes.append(len(self.udp.recv(1 << 16)))


def listen(request: dict[str, Any]) -> dict[str, Any]:
    listener = Listener(request["address"], request["name"], int(request.get("port", 0)))
    _listeners[listener.port] = listener
    return {"port": listener.port}


def dial(request: dict[str, Any]) -> dict[str, Any]:
    """Connects and reads the name of who answers."""
    place = (request["address"], int(request["port"]))
    began = time.perf_counter()
    try:
        with socket.create_connection(place, timeout=float(request["timeout_s"])) as connection:
            connect_s = time.perf_counter() - began
            connection.settimeout(float(request["timeout_s"]))
            name = connection.makefile("rb").readline().decode().strip()
    except TimeoutError:
        return {"outcome": "timeout", "detail": f"no answer from {place[0]}:{place[1]} in {request['timeout_s']} s"}
    except ConnectionRefusedError:
        return {"outcome": "refused", "detail": f"{place[0]}:{place[1]} refused the connection"}
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return {"outcome": "unreachable" if unreachable else "failed", "detail": error.strerror or str(error)}
    outcome = "ok" if name == request["expect"] else "stranger"
    return {"outcome": outcome, "detail": f"answered by {name}", "numbers": {"connect_s": connect_s}}


def hear(request: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the datagrams that came to a port."""
    return {"sizes": list(_listeners[int(request["port"])].sizes)}

"""Round trips of a message that is smaller than any packet."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from typing import Any

from shoal.net.gauge.dial import dial

_MESSAGE = b"shoal..."
_WARM_UP = 10


def answer(connection: socket.socket) -> None:
    """Sends back whatever comes, until the other side leaves."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        while part := connection.recv(1024):
            connection.sendall(part)


def round_trip(request: dict[str, Any]) -> dict[str, Any]:
    """The median of `count` trips, or of as many as `seconds` allow."""
    deadline = time.monotonic() + float(request["seconds"])
    trips: list[float] = []
    with dial(request, "echo") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(trips) < int(request["count"]) + _WARM_UP and (time.monotonic() < deadline or not trips):
            trips.append(_once(connection))
    counted = trips[_WARM_UP:] or trips
    return {"median_s": statistics.median(counted), "count": len(counted)}


def _once(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(_MESSAGE)
    missing = len(_MESSAGE)
    while missing:
        part = connection.recv(missing)
        if not part:
            raise ConnectionError("the other side closed the connection")
        missing -= len(part)
    return time.perf_counter() - began

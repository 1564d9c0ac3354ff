"""How one gauge calls another: it says a token, what it wants, and for which measurement."""

from __future__ import annotations

import socket
import time
from typing import Any

DIAL_S = 5.0
_LONGEST_LINE = 200


def dial(request: dict[str, Any], kind: str) -> socket.socket:
    connection = socket.create_connection((request["address"], int(request["port"])), timeout=DIAL_S)
    connection.sendall(f"{request['token']} {kind} {request.get('session', '-')}\n".encode())
    return connection


def read_call(connection: socket.socket) -> tuple[str, str, str]:
    """Token, kind and session, all of it in time. Byte by byte: what follows is measured."""
    line, deadline = b"", time.monotonic() + DIAL_S
    connection.settimeout(DIAL_S)
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (byte := connection.recv(1)):
        line += byte
        # Zero would mean not to wait at all, which is another error.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.settimeout(DIAL_S)
    token, kind, session = line.decode("ascii").split()
    return token, kind, session

"""The port at which a gauge is called. Whoever does not know the token is closed out without a word."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from typing import Any

from shoal.net.gauge import echo, flow
from shoal.net.gauge.dial import DIAL_S, read_call

_BACKLOG = 64


def listen(request: dict[str, Any]) -> dict[str, Any]:
    address = request["address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    threading.Thread(target=_welcome, args=(listener, request["token"]), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _welcome(listener: socket.socket, token: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, token), daemon=True).start()


def _serve(connection: socket.socket, token: str) -> None:
    with connection, contextlib.suppress(OSError, ValueError):
        connection.settimeout(DIAL_S)
        said, kind, session = read_call(connection)
        if not hmac.compare_digest(said, token):
            return
        if kind == "echo":
            echo.answer(connection)
        else:
            flow.drink(connection, session)

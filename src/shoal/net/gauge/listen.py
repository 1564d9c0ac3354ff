"""The port at which a gauge is called. Whoever does not know the token is closed out without a word."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from shoal.control.doorkeeper import Doorkeeper, Knock, Rules
from shoal.control.token import is_same
from shoal.net.gauge import echo, flow
from shoal.net.gauge.dial import read_call

_BACKLOG = 64


def listen(request: dict[str, Any]) -> dict[str, Any]:
    address = request["address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    threading.Thread(target=_welcome, args=(listener, request["token"]), daemon=True).start()
    return {"port": listener.getsockname()[1]}


class Reception:
    """A thread for each caller, and no more callers without the token at once than the doorkeeper has places for.
    Nobody is shut out for long: a measurement lasts seconds, and strangers may share an address with its callers."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._door = Doorkeeper(lambda _: None, time.monotonic, Rules(failures=1 << 30))
        self._lock = threading.Lock()

    def knock(self, connection: socket.socket, address: str) -> Knock | None:
        with self._lock:
            return self._door.knock(address, lambda: _shut(connection))

    def hear(self, connection: socket.socket, knock: Knock) -> tuple[str, str] | None:
        """What somebody with the token wants, or nothing."""
        try:
            said, kind, session = read_call(connection)
            return (kind, session) if is_same(said, self._token) else None
        finally:
            with self._lock:
                self._door.admit(knock)


def _welcome(listener: socket.socket, token: str) -> None:
    reception = Reception(token)
    while True:
        connection, address = listener.accept()
        if knock := reception.knock(connection, address[0]):
            threading.Thread(target=_serve, args=(connection, reception, knock), daemon=True).start()
        else:
            connection.close()


def _shut(connection: socket.socket) -> None:
    """Its own thread closes it: a number that is closed here might be another file's by then."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _serve(connection: socket.socket, reception: Reception, knock: Knock) -> None:
    with connection, contextlib.suppress(OSError, ValueError):
        wanted = reception.hear(connection, knock)
        if wanted is None:
            return
        kind, session = wanted
        if kind == "echo":
            echo.answer(connection)
        else:
            flow.drink(connection, session)

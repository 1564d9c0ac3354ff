"""Our own TCP probe: as many bytes as pass in a given time, counted where they arrive."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any

from shoal.net.gauge.dial import dial
from shoal.net.gauge.rate import Note, rate_bps

_BLOCK_BYTES = 1 << 18
_NOTE_EVERY_S = 0.005
# What brings nothing for so long is a link that died.
_STALL_S = 10.0
_RESET = struct.pack("ii", 1, 0)

_sinks: dict[str, Sink] = {}
_sources: dict[str, Source] = {}


class Sink:
    """The receiving end of one flow: one list of notes a stream."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._notes: list[list[Note]] = []
        self._ended = threading.Semaphore(0)

    def drink(self, connection: socket.socket) -> None:
        notes: list[Note] = []
        self._notes.append(notes)
        buffer, total = bytearray(_BLOCK_BYTES), 0
        connection.settimeout(_STALL_S)
        # The sender ends by a reset, which is an error here.
        with contextlib.suppress(OSError):
            while size := connection.recv_into(buffer):
                total += size
                now = time.monotonic()
                if not notes or now - notes[-1][0] > _NOTE_EVERY_S:
                    notes.append((now, total))
        self._ended.release()

    def wait(self) -> list[list[Note]]:
        for _ in range(self._streams):
            if not self._ended.acquire(timeout=_STALL_S):
                raise TimeoutError("a stream did not end")
        return self._notes


class Source:
    """The sending end: every stream in a thread of its own, because Python lets go of its lock while it sends."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._seconds = float(request["seconds"])
        self._error: OSError | None = None
        connections = [dial(request, "flow") for _ in range(int(request["streams"]))]
        self._threads = [threading.Thread(target=self._pour, args=(each,), daemon=True) for each in connections]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(self._seconds + _STALL_S)
        if self._error:
            raise self._error

    def _pour(self, connection: socket.socket) -> None:
        # Random: some tunnels compress, and would show a rate that no gradient gets.
        block, deadline = os.urandom(_BLOCK_BYTES), time.monotonic() + self._seconds
        try:
            with connection, contextlib.suppress(TimeoutError):
                # What is still unsent at the end is thrown away: on a slow link it would take seconds.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                while (left_s := deadline - time.monotonic()) > 0:
                    connection.settimeout(left_s)
                    connection.send(block)
        except OSError as error:
            self._error = error


def drink(connection: socket.socket, session: str) -> None:
    if sink := _sinks.get(session):
        sink.drink(connection)


def expect(request: dict[str, Any]) -> dict[str, Any]:
    """At the port where this gauge listens anyway."""
    _sinks[request["session"]] = Sink(int(request["streams"]))
    return {"port": request["port"]}


def send(request: dict[str, Any]) -> dict[str, Any]:
    _sources[request["session"]] = Source(request)
    return {}


def sent(request: dict[str, Any]) -> dict[str, Any]:
    _sources.pop(request["session"]).wait()
    return {}


def received(request: dict[str, Any]) -> dict[str, Any]:
    notes = _sinks.pop(request["session"]).wait()
    return {"bps": rate_bps(notes, float(request["seconds"]))}

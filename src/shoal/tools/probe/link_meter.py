"""`python -P -m shoal.tools.probe.link_meter`: the program on each node that measures its links.

It answers each JSON line on stdin with one on stdout, until stdin ends:

    {"do": "facts"}                                         →  {"memory_bytes": …, "arch": …, …}
    {"do": "listen", "address": "10.77.0.2", "token": …}    →  {"port": 40123}
    {"do": "round_trip", "address": …, "port": …, …}        →  {"median_s": 0.0002, …}

A flow has four steps: `expect` at the receiver, `send` at the sender, `sent` to wait there for its end, and `received`
for the rate. Bytes are sent in the background, so that several flows, in both directions, can run at the same time.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import statistics
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shoal.cluster.node_program import answer_requests
from shoal.control.channel import is_equal_secret
from shoal.control.connection_guard import ConnectionGuard, GuardLimits, PendingConnection
from shoal.host.facts import boot_id
from shoal.host.memory import total_bytes
from shoal.host.network import family_of

DIAL_S = 5.0
_LONGEST_LINE = 200
_BACKLOG = 64


def read_facts(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory_bytes": total_bytes(),
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": boot_id() or platform.node(),
    }


# Connections between the meters: a client sends a token, what it wants, and the session.


def dial(request: dict[str, Any], kind: str) -> socket.socket:
    connection = socket.create_connection((request["address"], int(request["port"])), timeout=DIAL_S)
    connection.sendall(f"{request['token']} {kind} {request.get('session', '-')}\n".encode())
    return connection


def _read_greeting(connection: socket.socket) -> tuple[str, str, str]:
    """Read token, kind and session, all within one timeout. Byte by byte: the bytes after the line are measured."""
    line, deadline = b"", time.monotonic() + DIAL_S
    connection.settimeout(DIAL_S)
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (byte := connection.recv(1)):
        line += byte
        # Zero would mean not to wait at all, which raises another error.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.settimeout(DIAL_S)
    token, kind, session = line.decode("ascii").split()
    return token, kind, session


def listen(request: dict[str, Any]) -> dict[str, Any]:
    address = request["address"]
    listener = socket.create_server((address, 0), family=family_of(address), backlog=_BACKLOG)
    server = _TokenServer(request["token"])
    threading.Thread(target=server.accept_all, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


class _TokenServer:
    """Serve clients that know the token, a thread each, and close all others without an answer.

    The guard limits how many unproved connections are open at once. No address is refused for failures: a measurement
    lasts only seconds, and foreign clients may share an address with a node.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._guard = ConnectionGuard(lambda _: None, time.monotonic, GuardLimits(failures=1 << 30))
        self._lock = threading.Lock()

    def accept_all(self, listener: socket.socket) -> None:
        while True:
            connection, address = listener.accept()

            # Only shut down here: its own thread closes it. A descriptor closed here might already be another file's.
            def turn_away(connection: socket.socket = connection) -> None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

            with self._lock:
                pending = self._guard.knock(address[0], turn_away)
            if pending:
                threading.Thread(target=self._serve, args=(connection, pending), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket, pending: PendingConnection) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                token, kind, session = _read_greeting(connection)
            finally:
                with self._lock:
                    self._guard.admit(pending)
            if not is_equal_secret(token, self._token):
                return
            if kind == "echo":
                _echo(connection)
            elif receiver := _receivers.get(session):
                receiver.receive(connection)


# Round trips of a message that is smaller than any packet.

_MESSAGE = b"shoal..."
_WARM_UP = 10


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        while part := connection.recv(1024):
            connection.sendall(part)


def measure_round_trip(request: dict[str, Any]) -> dict[str, Any]:
    """Return the median of `count` round trips, or of as many as `seconds` allow."""
    deadline = time.monotonic() + float(request["seconds"])
    trips_s: list[float] = []
    with dial(request, "echo") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(trips_s) < int(request["count"]) + _WARM_UP and (time.monotonic() < deadline or not trips_s):
            began = time.perf_counter()
            connection.sendall(_MESSAGE)
            missing = len(_MESSAGE)
            while missing:
                part = connection.recv(missing)
                if not part:
                    raise ConnectionError("the other side closed the connection")
                missing -= len(part)
            trips_s.append(time.perf_counter() - began)
    counted = trips_s[_WARM_UP:] or trips_s
    return {"median_s": statistics.median(counted), "count": len(counted)}


# Flows: as many bytes as pass in a given time, counted where they arrive.

# A time, and how many bytes had arrived by then.
Count = tuple[float, int]

_BLOCK_BYTES = 1 << 18
_COUNT_EVERY_S = 0.005
# A stream without data for this long belongs to a dead link.
_STALL_S = 10.0
# Close by a reset (SO_LINGER with timeout 0), which drops unsent data.
_RESET = struct.pack("ii", 1, 0)


class FlowReceiver:
    """The receiving end of one flow."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._counts: list[list[Count]] = []  # one list per stream
        self._ended = threading.Semaphore(0)

    def receive(self, connection: socket.socket) -> None:
        counts: list[Count] = []
        self._counts.append(counts)
        buffer, total = bytearray(_BLOCK_BYTES), 0
        connection.settimeout(_STALL_S)
        # The sender ends by a reset, which raises an error here.
        with contextlib.suppress(OSError):
            while size := connection.recv_into(buffer):
                total += size
                now = time.monotonic()
                if not counts or now - counts[-1][0] > _COUNT_EVERY_S:
                    counts.append((now, total))
        self._ended.release()

    def wait(self) -> list[list[Count]]:
        for _ in range(self._streams):
            if not self._ended.acquire(timeout=_STALL_S):
                raise TimeoutError("a stream did not end")
        return self._counts


class FlowSender:
    """The sending end: each stream in its own thread, because Python releases its lock while it sends."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._seconds = float(request["seconds"])
        self._error: OSError | None = None
        connections = [dial(request, "flow") for _ in range(int(request["streams"]))]
        self._threads = [threading.Thread(target=self._send, args=(stream,), daemon=True) for stream in connections]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(self._seconds + _STALL_S)
        if self._error:
            raise self._error

    def _send(self, connection: socket.socket) -> None:
        # Random: some tunnels compress, and would show a rate that no gradient reaches.
        block, deadline = os.urandom(_BLOCK_BYTES), time.monotonic() + self._seconds
        try:
            with connection, contextlib.suppress(TimeoutError):
                # Drop unsent data at the end: on a slow link it would take seconds.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                while (left_s := deadline - time.monotonic()) > 0:
                    connection.settimeout(left_s)
                    connection.send(block)
        except OSError as error:
            self._error = error


_receivers: dict[str, FlowReceiver] = {}
_senders: dict[str, FlowSender] = {}


def expect(request: dict[str, Any]) -> dict[str, Any]:
    _receivers[request["session"]] = FlowReceiver(int(request["streams"]))
    return {}


def send(request: dict[str, Any]) -> dict[str, Any]:
    _senders[request["session"]] = FlowSender(request)
    return {}


def sent(request: dict[str, Any]) -> dict[str, Any]:
    _senders.pop(request["session"]).wait()
    return {}


def received(request: dict[str, Any]) -> dict[str, Any]:
    counts = _receivers.pop(request["session"]).wait()
    return {"bps": rate_bps(counts, float(request["seconds"]))}


_SKIPPED_SHARE = 0.2
_MOST_SKIPPED_S = 0.5
_PARTS = 10


def rate_bps(streams: Sequence[Sequence[Count]], seconds: float) -> float:
    """Return the rate of all streams together, while all of them were flowing.

    The beginning does not count: TCP still searches for the rate, and a shaped link lets its first bytes pass early.
    The rest is divided into ten parts and the median is taken, so that a short disturbance by another program does
    not count either.
    """
    if not streams or not all(streams):
        raise ValueError("a stream brought nothing")
    begin = max(counts[0][0] for counts in streams) + min(_MOST_SKIPPED_S, _SKIPPED_SHARE * seconds)
    end = min(counts[-1][0] for counts in streams)
    if end <= begin:
        raise ValueError("the streams did not last")
    part_s = (end - begin) / _PARTS
    totals = [sum(_bytes_at(counts, begin + number * part_s) for counts in streams) for number in range(_PARTS + 1)]
    return 8 * statistics.median(after - before for before, after in pairwise(totals)) / part_s


def _bytes_at(counts: Sequence[Count], moment: float) -> float:
    """Interpolate between two counts."""
    after = bisect_right(counts, (moment, float("inf")))
    if after == len(counts):
        return float(counts[-1][1])
    if after == 0:
        return float(counts[0][1])
    (before_at, before_bytes), (after_at, after_bytes) = counts[after - 1], counts[after]
    return before_bytes + (after_bytes - before_bytes) * (moment - before_at) / (after_at - before_at)


ANSWERS = {
    "facts": read_facts,
    "listen": listen,
    "round_trip": measure_round_trip,
    "expect": expect,
    "send": send,
    "sent": sent,
    "received": received,
}


if __name__ == "__main__":
    answer_requests(ANSWERS)

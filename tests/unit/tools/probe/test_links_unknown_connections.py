"""Unknown connections to the port of a measurement are closed in time; callers with the token are served."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from shoal.tools.probe import link_meter
from shoal.tools.probe.link_meter import dial

LOOPBACK = "127.0.0.1"
TOKEN = "a1" * 16


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(link_meter, "DIAL_S", 1.0)
    return int(link_meter.listen({"address": LOOPBACK, "token": TOKEN})["port"])


def connect(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=10)


@pytest.mark.parametrize("sent", [b"", b"b2 echo -\n", b"\xff\xfe\n", b"x" * 500, TOKEN.encode() + b"\n"])
def test_a_connection_without_the_token_is_closed_without_an_answer(port: int, sent: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_a_request_sent_byte_by_byte_gets_no_extra_time(port: int) -> None:
    sent = 0
    with connect(port) as slow, contextlib.suppress(OSError):
        for sent in range(150):  # noqa: B007
            slow.sendall(b"x")
            time.sleep(0.05)
    assert sent < 149, "the connection was kept while bytes arrived"


@pytest.mark.long
def test_many_idle_connections_do_not_block_a_caller(port: int) -> None:
    idle = [connect(port) for _ in range(300)]
    try:
        with dial({"address": LOOPBACK, "port": port, "token": TOKEN}, "echo") as caller:
            caller.sendall(b"?")
            assert len(caller.recv(1)) == 1
    finally:
        for connection in idle:
            connection.close()

"""Strangers at the port of a measurement: closed in time, and callers with the token get through."""

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


@pytest.mark.parametrize("said", [b"", b"b2 echo -\n", b"\xff\xfe\n", b"x" * 500, TOKEN.encode() + b"\n"])
def test_who_does_not_know_the_token_is_closed_without_a_word(port: int, said: bytes) -> None:
    with connect(port) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_a_byte_at_a_time_gets_no_more_time(port: int) -> None:
    began = time.monotonic()
    with connect(port) as slow, contextlib.suppress(OSError):
        for _ in range(150):
            slow.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 5


@pytest.mark.long
def test_a_crowd_of_idle_ones_keeps_nobody_out(port: int) -> None:
    crowd = [connect(port) for _ in range(300)]
    try:
        with dial({"address": LOOPBACK, "port": port, "token": TOKEN}, "echo") as caller:
            caller.sendall(b"?")
            assert len(caller.recv(1)) == 1
    finally:
        for connection in crowd:
            connection.close()

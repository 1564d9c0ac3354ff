"""The same as `flow`, with iperf3 at both ends; the figures are again the receiver's."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import time
from typing import Any

from shoal.control.process import tie_to
from shoal.net.gauge.rate import skip_s

_LISTENS_WITHIN_S = 3.0
_SLACK_S = 15.0
_INTERVAL_S = 0.1

_servers: dict[str, subprocess.Popen[bytes]] = {}
_clients: dict[str, subprocess.Popen[bytes]] = {}


def expect(request: dict[str, Any]) -> dict[str, Any]:
    port = _free_port(request["address"])
    words = (
        "--server",
        "--one-off",
        "--bind",
        request["address"],
        "--port",
        str(port),
        "--interval",
        str(_INTERVAL_S),
        "--json",
    )
    _servers[request["session"]] = _start(words)
    _wait_until_taken(request["address"], port)
    return {"port": port}


def send(request: dict[str, Any]) -> dict[str, Any]:
    place = ("--client", request["address"], "--port", str(request["port"]))
    amount = ("--time", str(round(request["seconds"])), "--parallel", str(request["streams"]))
    _clients[request["session"]] = _start((*place, *amount, "--json"))
    return {}


def sent(request: dict[str, Any]) -> dict[str, Any]:
    _result(_clients.pop(request["session"]), request["seconds"])
    return {}


def received(request: dict[str, Any]) -> dict[str, Any]:
    said = _result(_servers.pop(request["session"]), request["seconds"])
    return {"bps": rate_of_intervals([entry["sum"] for entry in said["intervals"]], request["seconds"])}


def rate_of_intervals(intervals: list[dict[str, Any]], seconds: float) -> float:
    """The median, without the beginning, as in `rate.rate_bps`. The last interval may be a rest of no length."""
    counted = [entry for entry in intervals if entry["start"] >= skip_s(seconds) and entry["seconds"] > _INTERVAL_S / 2]
    if not counted:
        raise ValueError("iperf3 ended too early")
    return float(8 * statistics.median(entry["bytes"] / entry["seconds"] for entry in counted))


def end_all() -> None:
    for process in (*_servers.values(), *_clients.values()):
        process.kill()
        process.wait()


def _start(words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (shutil.which("iperf3") or "iperf3", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=tie_to(os.getpid()),
    )


def _result(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=seconds + _SLACK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    result: dict[str, Any] = json.loads(said)
    if error := result.get("error"):
        raise RuntimeError(f"iperf3: {error}")
    return result


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_taken(address: str, port: int) -> None:
    """By trying to bind there: a connection would be taken for the one test that the server gives."""
    deadline = time.monotonic() + _LISTENS_WITHIN_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            # Both may be used again, so this one is no hindrance to the server, and is refused once that listens.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return
        time.sleep(0.01)
    raise TimeoutError("iperf3 does not listen")

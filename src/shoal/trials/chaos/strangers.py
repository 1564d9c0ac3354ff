"""Connections from nobody: nonsense and silence at every port that the processes of a run listen on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from shoal.cluster.lab.lab import Lab
from shoal.errors import LabError
from shoal.launch.found import find

# Runs on a node: a socket belongs to the network of whoever made it. Idle ones are held until it is told to end.
_PROGRAM = """
import os, socket, sys
count, idle, held = int(sys.argv[1]), int(sys.argv[2]), []
for place in sys.argv[3:]:
    address, _, port = place.rpartition(":")
    for number in range(count + idle):
        try:
            peer = socket.create_connection((address, int(port)), timeout=2)
            if number < count:
                peer.sendall(os.urandom(64))
                peer.close()
            else:
                held.append(peer)
        except OSError:
            pass
print("done", flush=True)
sys.stdin.read()
"""
_DEADLINE_S = 60.0


def garbage(run: Path, lab: Lab | None, connections: int, idle: int) -> Callable[[], None]:
    """Knocks at the ports that are open now; the idle connections last as long as the knocking does."""
    ports = listening(run)
    if not ports:
        raise LabError(f"no process of {run} listens", why="it is over, or they are not ours to look into")

    def knock() -> None:
        for node, places in ports.items():
            words = [sys.executable, "-c", _PROGRAM, str(connections), str(idle), *places]
            argv = lab.command(node, words) if lab else words
            done = subprocess.run(argv, input="", capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
            if "done" not in done.stdout:
                raise LabError("nobody could knock", why=done.stderr.strip()[-300:])

    return knock


def listening(run: Path) -> dict[str, list[str]]:
    """`address:port` by node."""
    found: dict[str, list[str]] = {}
    for process in find(run):
        try:
            sockets = psutil.Process(process.pid).net_connections(kind="tcp4")
        except psutil.Error:
            continue
        for each in sockets:
            if each.status == psutil.CONN_LISTEN:
                found.setdefault(process.node, []).append(f"{each.laddr.ip}:{each.laddr.port}")
    return found

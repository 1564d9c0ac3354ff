"""Connections from nobody: nonsense and silence at every port that the processes of a run listen on."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shoal.cluster.lab.lab import Lab
from shoal.errors import LabError
from shoal.launch.found import find

# Runs on a node: a socket belongs to the network of whoever made it. Many at a time, since a server that takes its time
# with strangers is right to, and at a port of gloo's, which is shut, a knock takes its whole second. Idle ones are held
# until the last has knocked.
_PROGRAM = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
count, idle, places = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def knock(job):
    (address, port), talks = job
    try:
        peer = socket.create_connection((address, port), timeout=1)
        if not talks:
            return peer
        with peer:
            peer.sendall(os.urandom(64))
    except OSError:
        pass
doors = [(place.rpartition(":")[0], int(place.rpartition(":")[2])) for place in places]
jobs = [(door, number < count) for number in range(count + idle) for door in doors]
with ThreadPoolExecutor(100) as pool:
    held = list(pool.map(knock, jobs))
print("done", sum(peer is not None for peer in held), flush=True)
"""
_DEADLINE_S = 180.0
_LISTENING = "0A"


def garbage(run: Path, lab: Lab | None, connections: int, idle: int) -> Callable[[], None]:
    """Knocks at the ports that are open now; the idle connections last as long as the knocking does."""
    ports = listening(run)
    if not ports:
        raise LabError(f"no process of {run} listens", why="it is over, or they are not ours to look into")

    def knock_everywhere() -> None:
        with ThreadPoolExecutor(len(ports)) as nodes:
            enter = {node: partial(lab.command, node) if lab else list for node in ports}
            done = [nodes.submit(knock, places, connections, idle, enter[node]) for node, places in ports.items()]
            for each in done:
                each.result()

    return knock_everywhere


def knock(places: list[str], connections: int, idle: int, enter: Callable[[list[str]], list[str]]) -> None:
    """`enter` makes the command one that runs on the node."""
    argv = enter([sys.executable, "-P", "-c", _PROGRAM, str(connections), str(idle), *places])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(
            f"knocking at the ports took more than {_DEADLINE_S:.0f} s", fix="try fewer connections"
        ) from None
    said = re.fullmatch(r"done (\d+)\n", done.stdout)
    if said is None or (idle and not int(said[1])):
        raise LabError("nobody could knock", why=done.stderr.strip()[-300:])


def listening(run: Path) -> dict[str, list[str]]:
    """`address:port` by node. Read from each process's own table: one of a node is in another network than ours."""
    found: dict[str, list[str]] = {}
    for process in find(run):
        place = Path("/proc") / str(process.pid)
        with contextlib.suppress(OSError):
            held = {str(link.readlink()) for link in (place / "fd").iterdir()}
            found.setdefault(process.node, []).extend(open_ports((place / "net/tcp").read_text(), held))
    return {node: places for node, places in found.items() if places}


def open_ports(table: str, held: set[str]) -> list[str]:
    """From the kernel's table of TCP sockets: those that listen and are among the descriptors `held`."""
    rows = (line.split() for line in table.splitlines()[1:])
    return [_place(row[1]) for row in rows if row[3] == _LISTENING and f"socket:[{row[9]}]" in held]


def _place(digits: str) -> str:
    """The kernel prints an address as a number in the machine's own order."""
    address, _, port = digits.partition(":")
    return f"{socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))}:{int(port, 16)}"

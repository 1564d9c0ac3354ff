"""Damage to files, disks and memory, and unknown connections."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from shoal.cluster.lab import ShoalLab
from shoal.control.processes import find_processes
from shoal.errors import LabError
from shoal.host.proc import tcp_sockets_of

FILLER = "filler"
_BLOCK = bytes(64 * 1024)

FileDamage = Literal["flip", "truncate", "zero"]


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    with (disk / FILLER).open("ab", buffering=0) as file:
        block = _BLOCK
        while block:
            try:
                file.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block = block[: len(block) // 2]


def free(disk: Path) -> None:
    (disk / FILLER).unlink(missing_ok=True)


def corrupt_newest(checkpoints: Path, how: FileDamage, draw: random.Random) -> Path:
    """Corrupt one random file of the newest complete checkpoint and return it."""
    newest = _newest_checkpoint(checkpoints)
    files = sorted(path for path in newest.iterdir() if path.is_file() and path.stat().st_size)
    chosen = draw.choice(files)
    chosen.write_bytes(corrupt(chosen.read_bytes(), how, draw))
    return chosen


def _newest_checkpoint(checkpoints: Path) -> Path:
    complete = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not complete:
        raise LabError(f"there is no checkpoint in {checkpoints}", why="the run had not reached its first one")
    return complete[-1]


def corrupt(content: bytes, how: FileDamage, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    match how:
        case "truncate":
            return content[:place]
        case "zero":
            return bytes(len(content))
        case "flip":
            changed = content[place] ^ (1 << draw.randrange(8))
            return content[:place] + bytes([changed]) + content[place + 1 :]


# Memory: the weight is found by its bytes, which the newest checkpoint has. So the weights must not change meanwhile: a
# learning rate of 1e-30 changes no 32-bit number.

MemoryDamage = Literal["flip", "nan"]
_NAN = struct.pack("<f", float("nan"))
# Bytes of a matrix: enough that they occur nowhere else by chance.
_PATTERN_BYTES = 256
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw\S* \S+ \S+ (\d+)")


def prepare_memory_damage(pid: int, checkpoints: Path, how: MemoryDamage, draw: random.Random) -> Callable[[], None]:
    """Find every copy of one weight in a process; return the function that changes them.

    Searching takes longer than many steps, changing does not.
    """
    name, pattern = known_weight(checkpoints)
    place = 4 * draw.randrange(_PATTERN_BYTES // 4)
    number = pattern[place : place + 4]
    changed = _NAN if how == "nan" else bytes([number[0] ^ 1 << draw.randrange(8), *number[1:]])
    with _memory(pid) as memory:
        addresses = list(_find_pattern(pid, memory, pattern))
    if not addresses:
        raise LabError(
            f"{name} of the last checkpoint is nowhere in the memory of process {pid}",
            why="its weights have changed since",
            fix="keep them unchanged: train.lr = 1e-30 in the scenario's training",
        )

    def change() -> None:
        with _memory(pid) as memory:
            for address in addresses:
                os.pwrite(memory, changed, address + place)

    return change


@contextmanager
def _memory(pid: int) -> Iterator[int]:
    try:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as file:
            yield file.fileno()
    except PermissionError:
        raise LabError(f"the memory of process {pid} cannot be written", fix="try it as root") from None


def known_weight(checkpoints: Path) -> tuple[str, bytes]:
    """Return name and first bytes of the first matrix in the newest complete checkpoint."""
    content = (_newest_checkpoint(checkpoints) / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    tensors = json.loads(content[8 : 8 + length])
    matrices = sorted(name for name, entry in tensors.items() if len(entry.get("shape", ())) == 2)
    begin = 8 + length + tensors[matrices[0]]["data_offsets"][0]
    return matrices[0], content[begin : begin + _PATTERN_BYTES]


def _find_pattern(pid: int, memory: int, pattern: bytes) -> Iterator[int]:
    """Yield addresses in writable memory that is not mapped from a file, as far as it can be read."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = _MAPPING.match(line)
        if match is None or match[3] != "0":
            continue
        begin, end = int(match[1], 16), int(match[2], 16)
        try:
            content = os.pread(memory, end - begin, begin)
        except OSError:
            continue
        at = content.find(pattern)
        while at >= 0:
            yield begin + at
            at = content.find(pattern, at + 1)


# Runs on a node, because a socket belongs to the network namespace of its process. Many connections in parallel: a
# server may be slow with unknown clients, and at gloo's ports, which are shut, each attempt takes its whole second.
# Idle ones stay open until the last attempt.
_PROGRAM = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
count, idle, places = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def connect(job):
    (address, port), sends = job
    try:
        peer = socket.create_connection((address, port), timeout=1)
        if not sends:
            return peer
        with peer:
            peer.sendall(os.urandom(64))
    except OSError:
        pass
ports = [(place.rpartition(":")[0], int(place.rpartition(":")[2])) for place in places]
jobs = [(port, number < count) for number in range(count + idle) for port in ports]
with ThreadPoolExecutor(100) as pool:
    opened = list(pool.map(connect, jobs))
print("done", sum(peer is not None for peer in opened), flush=True)
"""
_CONNECT_TIMEOUT_S = 180.0


def prepare_connections(run: Path, lab: ShoalLab | None, connections: int, idle: int) -> Callable[[], None]:
    """Find the open ports of a run; return the function that connects to all of them.

    The idle connections stay open until all attempts are done.
    """
    ports = listening(run)
    if not ports:
        raise LabError(f"no process of {run} listens", why="it is over, or its processes belong to another user")

    def connect_everywhere() -> None:
        with ThreadPoolExecutor(len(ports)) as pool:
            on_node = {node: partial(lab.command, node) if lab else list for node in ports}
            futures = [pool.submit(connect, places, connections, idle, on_node[node]) for node, places in ports.items()]
            for future in futures:
                future.result()

    return connect_everywhere


def connect(places: list[str], connections: int, idle: int, on_node: Callable[[list[str]], list[str]]) -> None:
    """Open the connections; `on_node` makes a command run on the node."""
    argv = on_node([sys.executable, "-P", "-c", _PROGRAM, str(connections), str(idle), *places])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_CONNECT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(
            f"connecting to the ports took more than {_CONNECT_TIMEOUT_S:.0f} s", fix="try fewer connections"
        ) from None
    match = re.fullmatch(r"done (\d+)\n", done.stdout)
    if match is None or (idle and not int(match[1])):
        raise LabError("no connection could be opened", why=done.stderr.strip()[-300:])


def listening(run: Path) -> dict[str, list[str]]:
    """Return `address:port` by node, from each process's own table: a node has its own network namespace."""
    ports: dict[str, list[str]] = {}
    for process in find_processes(run):
        with contextlib.suppress(OSError):
            ports.setdefault(process.node, []).extend(open_ports(process.pid))
    return {node: places for node, places in ports.items() if places}


def open_ports(pid: int) -> list[str]:
    """Return where a process listens at an IPv4 address."""
    sockets = tcp_sockets_of(pid)
    return [f"{sock.address}:{sock.port}" for sock in sockets if sock.is_listening and sock.address.version == 4]

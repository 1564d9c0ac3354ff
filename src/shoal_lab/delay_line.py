"""Delay a node's packets where the kernel has no netem: a process between the switch and the node's cable.

    python -I -S delay_line.py PID-FILE NODE-END SWITCH-END SECONDS

Both devices are ends of veth pairs. Frames that arrive at the switch's end leave by the node's end SECONDS later; those
of the other direction leave at once, as with netem, which delays only what a node receives. Packet sockets with a
virtio header carry bundles of up to 64 kB and unfinished checksums as they are: a frame costs about 40 µs of processor
time, whatever its size. Run by its path without site packages, since a lab waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 16 << 20
_FRAME_BYTES = 10 + 14 + 65536
# Frames of one direction before those of the other are handled.
_TURN = 64
# What may be on its way: 10 Gbit/s for 50 ms. More is dropped, as a full queue does.
_MOST_HELD_BYTES = 64 << 20
_PR_SET_TIMERSLACK = 29
# The device was removed or set down: the node was killed, or the lab is being taken down.
_GONE = (errno.ENETDOWN, errno.ENXIO, errno.ENODEV)


def main(pid_file: str, node_end: str, switch_end: str, seconds: str) -> None:
    node, switch = _open(node_end), _open(switch_end)
    _raise_priority()
    # /proc is the host's here, so this is the number by which the lab knows this process.
    number = Path("/proc/self/stat").read_text(encoding="ascii").split()[0]
    Path(pid_file).write_text(f"{number}\n", encoding="ascii")
    try:
        forward(node, switch, float(seconds))
    except OSError as error:
        if error.errno not in _GONE:
            raise


def forward(node: socket.socket, switch: socket.socket, delay_s: float) -> None:
    """Forward frames until one of the devices is gone."""
    held: deque[tuple[float, bytes]] = deque()
    held_bytes = 0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select((node, switch), (), (), wait_s)
        if switch in readable:
            due = time.monotonic() + delay_s
            for frame in _receive(switch):
                if held_bytes + len(frame) <= _MOST_HELD_BYTES:
                    held.append((due, frame))
                    held_bytes += len(frame)
        if node in readable:
            for frame in _receive(node):
                _send(switch, frame)
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, frame = held.popleft()
            held_bytes -= len(frame)
            _send(node, frame)


def _open(device: str) -> socket.socket:
    """Open a socket that receives every frame that arrives at the device, and sends frames out of it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setblocking(False)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    try:
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    except PermissionError:
        # In a user namespace the machine's limit applies.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    port.bind((device, _ALL_PROTOCOLS))
    return port


def _receive(port: socket.socket) -> list[bytes]:
    frames = []
    for _ in range(_TURN):
        try:
            frames.append(port.recv(_FRAME_BYTES))
        except BlockingIOError:
            break
    return frames


def _send(port: socket.socket, frame: bytes) -> None:
    try:
        port.send(frame)
    except OSError as error:
        # A full queue of the device drops the frame, as it does with frames of the kernel.
        if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.EINVAL, errno.EMSGSIZE):
            raise


def _raise_priority() -> None:
    """Run before the ranks, which use every core, and without the 50 µs by which the kernel may wake a process late."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


if __name__ == "__main__":
    main(*sys.argv[1:])

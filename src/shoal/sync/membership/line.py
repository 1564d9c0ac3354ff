"""A rank's connection to its agent about membership: framed messages, the socket inherited."""

from __future__ import annotations

import socket
import threading

from shoal.control.rankline import LENGTH, MOST_BYTES, ToAgent, ToRank, read_to_rank, to_frame
from shoal.errors import ControlError


class AgentLine:
    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()

    def send(self, message: ToAgent) -> None:
        """OSError when the agent is gone; the kernel ends us with it."""
        with self._sending:
            self._socket.sendall(to_frame(message))

    def receive(self) -> ToRank | None:
        """None when the agent has closed its end."""
        head = self._read(LENGTH)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if size > MOST_BYTES:
            raise ControlError(f"a message of {size} bytes from the agent", why="the stream is broken")
        payload = self._read(size)
        return None if payload is None else read_to_rank(payload)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

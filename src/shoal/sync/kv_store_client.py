"""The store by which ranks meet, when an agent started them: torch's interface over the agent's connection.

The agents keep the keys (`launch.keystore`); here is the other end of the socket that a rank inherits.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LENGTH = 4
# One question blocks at most this long: another thread of this process may have one, too.
_TURN_S = 0.2
# Locks are not fair: who asks again at once would be first again (measured: others waited up to 2.4 s).
_STEP_BACK_S = 0.002


class AgentStore(dist.Store):
    """`is_vain` is asked while we wait: whoever is told that its generation is over has nobody to wait for."""

    def __init__(self, fd: int, timeout: timedelta, is_vain: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._is_vain = is_vain
        self._socket = socket.socket(fileno=fd)
        self._asking = threading.Lock()
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(op="set", key=key, value=_encode(value))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (value := self._ask(op="get", key=key, wait_s=_TURN_S)["value"]) is None:
            self._go_on_waiting(deadline, [key])
        return base64.b64decode(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._ask(op="check", keys=keys, wait_s=_TURN_S)["there"]:
            self._go_on_waiting(deadline, keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(op="check", keys=keys)["there"])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(op="add", key=key, amount=amount)["total"])

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        reply = self._ask(op="swap", key=key, expected=_encode(expected), value=_encode(value))
        return base64.b64decode(reply["value"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=key)["deleted"])

    def num_keys(self) -> int:
        return int(self._ask(op="count")["count"])

    def derive_key(self, label: str) -> bytes:
        """A key that depends on the run's token and this label; the rank's own agent computes it."""
        return base64.b64decode(self._ask(op="derive", label=label)["value"])

    # What torch's C++ half calls them, when a prefix stands before the store.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _go_on_waiting(self, deadline: float, keys: list[str]) -> None:
        """Or not; and let another thread have its turn before we ask again."""
        if self._is_vain() or time.monotonic() > deadline:
            raise dist.DistStoreError(f"nobody set {', '.join(keys)} in time")
        time.sleep(_STEP_BACK_S)

    def _ask(self, **request: Any) -> dict[str, Any]:
        payload = json.dumps(request).encode()
        with self._asking:
            self._socket.sendall(len(payload).to_bytes(_LENGTH, "big") + payload)
            reply: dict[str, Any] = json.loads(self._read(int.from_bytes(self._read(_LENGTH), "big")))
        if "error" in reply:
            raise dist.DistStoreError(reply["error"])
        return reply

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not (part := self._socket.recv(size - len(parts))):
                raise dist.DistStoreError("the agent that keeps the keys closed the connection")
            parts += part
        return bytes(parts)


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()

"""A torch Store over the socket that a rank inherits from its agent. The agents hold the keys (`agent/kv_store.py`)."""

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

from shoal.control.channel import frame, receive_frame

# The agent answers with keys that this process set, or with an error of one line.
_MAX_REPLY_BYTES = 64 << 20
# One request blocks at most this long, because another thread of this process may need the connection.
_REQUEST_WAIT_S = 0.2
# Locks are not fair: a thread that asks again at once gets the lock first again (measured: others waited up to 2.4 s).
_YIELD_S = 0.002


class AgentStore(dist.Store):
    def __init__(self, fd: int, timeout: timedelta, is_vain: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        # Asked while a call waits. True ends the wait: the generation is over, so the keys will never be set.
        self._is_vain = is_vain
        self._socket = socket.socket(fileno=fd)
        self._request_lock = threading.Lock()
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._request(op="set", key=key, value=_encode(value))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (value := self._request(op="get", key=key, wait_s=_REQUEST_WAIT_S)["value"]) is None:
            self._pause_or_raise(deadline, [key])
        return base64.b64decode(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._request(op="check", keys=keys, wait_s=_REQUEST_WAIT_S)["there"]:
            self._pause_or_raise(deadline, keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._request(op="check", keys=keys)["there"])

    def add(self, key: str, amount: int) -> int:
        return int(self._request(op="add", key=key, amount=amount)["total"])

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        reply = self._request(op="swap", key=key, expected=_encode(expected), value=_encode(value))
        return base64.b64decode(reply["value"])

    def delete_key(self, key: str) -> bool:
        return bool(self._request(op="delete", key=key)["deleted"])

    def num_keys(self) -> int:
        return int(self._request(op="count")["count"])

    def derive_key(self, label: str) -> bytes:
        """Return a key that depends on the run's token and the label; the rank's own agent computes it."""
        return base64.b64decode(self._request(op="derive", label=label)["value"])

    # A C++ PrefixStore around this store calls these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _pause_or_raise(self, deadline: float, keys: list[str]) -> None:
        """Raise after the deadline or the generation's end; otherwise give other threads a chance at the connection."""
        if self._is_vain() or time.monotonic() > deadline:
            raise dist.DistStoreError(f"no rank set {', '.join(keys)} in time")
        time.sleep(_YIELD_S)

    def _request(self, **request: Any) -> dict[str, Any]:
        payload = json.dumps(request).encode()
        with self._request_lock:
            try:
                self._socket.sendall(frame(payload))
                answer = receive_frame(self._socket, _MAX_REPLY_BYTES, "a reply of the agent's key-value store")
            except ConnectionError:
                answer = None
        if answer is None:
            raise dist.DistStoreError("the agent that keeps the keys closed the connection")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise dist.DistStoreError(reply["error"])
        return reply


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()

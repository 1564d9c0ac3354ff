"""The keys by which ranks find each other, kept by the agents: what torch calls a store.

A rank asks its own agent over a socket it inherited; that one answers, or passes the question on to the agent that
keeps the keys, over their authenticated channel. So no rank opens a port for it, and no stranger can write a key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

from shoal.errors import ControlError

Request = dict[str, Any]
Reply = dict[str, Any]

LENGTH = 4
# A key's value is an address or a few counters; the largest that torch itself sets has some kilobytes.
MOST_REQUEST_BYTES = 16 << 20
# A waiting rank asks again after this long, so that another thread of it gets its turn.
LONGEST_WAIT_S = 0.2


class KeyStore:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def answer(self, request: Request) -> Reply:
        operation = {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "swap": self._swap,
            "check": self._check,
            "delete": self._delete,
            "count": self._count,
        }.get(str(request.get("op")))
        if operation is None:
            return {"error": f"the agents' store knows no {request.get('op')!r}"}
        try:
            return await operation(request)
        except (KeyError, ValueError, TypeError) as error:
            # A rank without an answer would wait for ever.
            return {"error": f"the agents' store cannot {request['op']} that: {error!r}"}

    async def _set(self, request: Request) -> Reply:
        await self._put(request["key"], decode(request["value"]))
        return {}

    async def _put(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _get(self, request: Request) -> Reply:
        """The value, or none when nobody has set it within a short wait."""
        if await self._all_there([request["key"]], request):
            return {"value": encode(self._values[request["key"]])}
        return {"value": None}

    async def _check(self, request: Request) -> Reply:
        return {"there": await self._all_there(request["keys"], request)}

    async def _all_there(self, keys: list[str], request: Request) -> bool:
        def there() -> bool:
            return all(key in self._values for key in keys)

        wait_s = min(float(request.get("wait_s", 0.0)), LONGEST_WAIT_S)
        if wait_s <= 0 or there():
            return there()
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(there)
        except TimeoutError:
            return False
        return True

    async def _add(self, request: Request) -> Reply:
        total = int(self._values.get(request["key"], b"0")) + int(request["amount"])
        await self._put(request["key"], str(total).encode())
        return {"total": total}

    async def _swap(self, request: Request) -> Reply:
        """torch's rule: an empty expectation sets a missing key; otherwise the answer is what is there afterwards."""
        expected, wanted = decode(request["expected"]), decode(request["value"])
        now = self._values.get(request["key"])
        if now == expected or (now is None and not expected):
            await self._put(request["key"], wanted)
            return {"value": encode(wanted)}
        return {"value": encode(expected if now is None else now)}

    async def _delete(self, request: Request) -> Reply:
        return {"deleted": self._values.pop(request["key"], None) is not None}

    async def _count(self, request: Request) -> Reply:
        return {"count": len(self._values)}


def derive_key(token: str, request: Request) -> Reply:
    """A key for the ranks that depends on the run's token and on the label in the request. Only the rank's own agent
    answers this, so that the key crosses no network."""
    text = json.dumps(["shoal key for ranks", str(request.get("label"))])
    return {"value": encode(hmac.new(token.encode(), text.encode(), hashlib.sha256).digest())}


def encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises `ControlError` for a message that no rank of ours sends."""
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if size > MOST_REQUEST_BYTES:
        raise ControlError(f"a rank asked the agents' store with {size} bytes", why="the stream is broken")
    try:
        request = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ControlError("a rank asked the agents' store what cannot be read", why="the stream is broken")
    return request


def to_frame(message: dict[str, Any]) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return len(payload).to_bytes(LENGTH, "big") + payload

"""The key-value store by which ranks find each other, served by the agents: what torch calls a store.

A rank asks its own agent over a socket it inherited. The agent answers, or forwards the request over its authenticated
channel to the agent that has the keys. So no rank opens a port for the store, and only processes of the run can write a
key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from shoal.control.channel import Message, frame, read_frame
from shoal.control.membership.settings import KV_WAIT_S
from shoal.control.membership.types import Ballot, Generation
from shoal.control.rank_messages import generation_of
from shoal.errors import ControlError

Request = dict[str, Any]
Reply = dict[str, Any]
Send = Callable[[int, Message], Awaitable[bool]]

# A value is an address or a few counters; the largest that torch itself sets has some kilobytes.
MAX_REQUEST_BYTES = 16 << 20


class KvStore:
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
            return {"error": f"the agents' store has no operation {request.get('op')!r}"}
        try:
            return await operation(request)
        except (KeyError, ValueError, TypeError) as error:
            # A rank without an answer would wait forever.
            return {"error": f"the agents' store cannot {request['op']} that: {error!r}"}

    async def _set(self, request: Request) -> Reply:
        await self._put(request["key"], decode(request["value"]))
        return {}

    async def _put(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _get(self, request: Request) -> Reply:
        """Return the value, or None when the key is not set within the request's short wait."""
        if await self._have_all([request["key"]], request):
            return {"value": encode(self._values[request["key"]])}
        return {"value": None}

    async def _check(self, request: Request) -> Reply:
        return {"there": await self._have_all(request["keys"], request)}

    async def _have_all(self, keys: list[str], request: Request) -> bool:
        def have_all() -> bool:
            return all(key in self._values for key in keys)

        wait_s = min(float(request.get("wait_s", 0.0)), KV_WAIT_S)
        if wait_s <= 0 or have_all():
            return have_all()
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(have_all)
        except TimeoutError:
            return False
        return True

    async def _add(self, request: Request) -> Reply:
        total = int(self._values.get(request["key"], b"0")) + int(request["amount"])
        await self._put(request["key"], str(total).encode())
        return {"total": total}

    async def _swap(self, request: Request) -> Reply:
        """Compare and set by torch's rule: an empty expectation sets a missing key; return the value afterwards."""
        expected, wanted = decode(request["expected"]), decode(request["value"])
        present = self._values.get(request["key"])
        if present == expected or (present is None and not expected):
            await self._put(request["key"], wanted)
            return {"value": encode(wanted)}
        return {"value": encode(expected if present is None else present)}

    async def _delete(self, request: Request) -> Reply:
        return {"deleted": self._values.pop(request["key"], None) is not None}

    async def _count(self, request: Request) -> Reply:
        return {"count": len(self._values)}


def derive_key(token: str, request: Request) -> Reply:
    """Derive a key for the ranks from the run's token and the request's label.

    Only the rank's own agent answers this, so the key crosses no network.
    """
    text = json.dumps(["shoal key for ranks", str(request.get("label"))])
    return {"value": encode(hmac.new(token.encode(), text.encode(), hashlib.sha256).digest())}


def encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Read a rank's request; ControlError for a message that no rank sends."""
    payload = await read_frame(reader, MAX_REQUEST_BYTES, "a rank's request to the agents' store")
    try:
        request = json.loads(payload)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ControlError("a rank's request to the agents' store cannot be read", why="the stream is broken")
    return request


def to_frame(message: dict[str, Any]) -> bytes:
    return frame(json.dumps(message, separators=(",", ":")).encode())


@dataclass(frozen=True)
class _PendingRequest:
    server: int
    generation: Ballot | None
    reply: asyncio.Future[Reply]


class KvStoreClient:
    """Routes requests of local ranks to the agent that serves the keys, and serves this agent's own.

    Every generation has its own keys, served by the agent of its lowest member; a request for an older generation fails
    at once. Keys without a generation are served by member 0 for as long as it lives.
    """

    def __init__(self, me: int, send: Send, token: str) -> None:
        self._me = me
        self._token = token
        self._send = send
        self._current: Generation | None = None
        self._stores: dict[Ballot | None, KvStore] = {None: KvStore()}
        self._pending: dict[int, _PendingRequest] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._last_id = 0

    def enter(self, generation: Generation) -> None:
        """Forget the keys of older generations, and fail pending requests for them."""
        self._current = generation
        for old in [name for name in self._stores if name is not None and name < generation.id]:
            del self._stores[old]
        self._fail("that generation is over", lambda request: (request.generation or generation.id) < generation.id)

    def lose(self, member: int, how: str) -> None:
        self._fail(f"the agent that keeps the keys is gone: {how}", lambda request: request.server == member)

    async def ask(self, request: Request) -> Reply:
        """Answer a request of one of this agent's ranks."""
        if request.get("op") == "derive":
            return derive_key(self._token, request)
        generation = _generation_of(request)
        server = self._server_of(generation)
        if server is None:
            return {"error": f"no agent keeps the keys of generation {generation}: it is not the one we are in"}
        if server == self._me:
            return await self.answer(request)
        self._last_id += 1
        number, pending = self._last_id, _PendingRequest(server, generation, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            if not await self._send(server, {"type": "ask", "id": number, "request": request}):
                return {"error": "the agent that keeps the keys is gone"}
            return await pending.reply
        finally:
            del self._pending[number]

    async def answer(self, request: Request) -> Reply:
        """Answer from this agent's stores. The sender may have learnt of a new generation a moment earlier."""
        generation = _generation_of(request)
        if generation is not None and self._current is not None and generation < self._current.id:
            return {"error": f"generation {generation} is over"}
        return await self._stores.setdefault(generation, KvStore()).answer(request)

    def on_message(self, member: int, message: Message) -> None:
        """Handle a request of another agent, or its reply to one of this agent's."""
        match message:
            case {"type": "ask", "id": number, "request": dict(request)}:
                # Not awaited here: a request may wait for a key that this very peer sets next.
                task = asyncio.ensure_future(self._answer(member, number, request))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case {"type": "answer", "id": int(number), "reply": dict(reply)}:
                pending = self._pending.get(number)
                if pending is not None and not pending.reply.done():
                    pending.reply.set_result(reply)

    async def _answer(self, member: int, number: object, request: Request) -> None:
        await self._send(member, {"type": "answer", "id": number, "reply": await self.answer(request)})

    def _server_of(self, generation: Ballot | None) -> int | None:
        if generation is None:
            return 0
        current = self._current
        return min(current.members) if current is not None and current.id == generation else None

    def _fail(self, error: str, concerns: Callable[[_PendingRequest], bool]) -> None:
        for pending in self._pending.values():
            if concerns(pending) and not pending.reply.done():
                pending.reply.set_result({"error": error})


def _generation_of(request: Request) -> Ballot | None:
    keys = [request.get("key"), *(request.get("keys") or ())]
    return next((generation_of(key) for key in keys if isinstance(key, str)), None)

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from shoal.control.channel import Message
from shoal.control.membership.types import Ballot, Generation
from shoal.control.rank_messages import generation_of
from shoal.errors import ControlError

Request = dict[str, Any]
Reply = dict[str, Any]

LENGTH = 4
# A key's value is an address or a few counters; the largest that torch itself sets has some kilobytes.
MOST_REQUEST_BYTES = 16 << 20
# A waiting rank asks again after this long, so that another thread of it gets its turn.
LONGEST_WAIT_S = 0.2


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


# SECTION launch/keyring
# Who keeps which keys, and how a rank's question gets there and back.
#
# Each generation has keys of its own, kept by the agent of its lowest member; a question about an older one is answered
# with an error at once. Keys that belong to no generation are kept by the first member for as long as it lives.


Tell = Callable[[int, Message], Awaitable[bool]]


@dataclass(frozen=True)
class _Question:
    supervisor: int
    generation: Ballot | None
    answer: asyncio.Future[Reply]


class KvStoreClient:
    def __init__(self, me: int, tell: Tell, token: str) -> None:
        self._me = me
        self._token = token
        self._tell = tell
        self._current: Generation | None = None
        self._stores: dict[Ballot | None, KvStore] = {None: KvStore()}
        self._questions: dict[int, _Question] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._asked = 0

    def enter(self, generation: Generation) -> None:
        """Older generations' keys are forgotten, and who still asks for one hears so."""
        self._current = generation
        for old in [name for name in self._stores if name is not None and name < generation.id]:
            del self._stores[old]
        self._settle("that generation is over", lambda question: (question.generation or generation.id) < generation.id)

    def lose(self, member: int, how: str) -> None:
        self._settle(f"the agent that keeps the keys is gone: {how}", lambda question: question.supervisor == member)

    async def ask(self, request: Request) -> Reply:
        """For one of our own ranks."""
        if request.get("op") == "derive":
            return derive_key(self._token, request)
        generation = _generation_asked_for(request)
        supervisor = self._supervisor_of(generation)
        if supervisor is None:
            return {"error": f"nobody keeps the keys of generation {generation}: it is not the one we are in"}
        if supervisor == self._me:
            return await self.answer(request)
        self._asked += 1
        number, question = self._asked, _Question(supervisor, generation, asyncio.get_running_loop().create_future())
        self._questions[number] = question
        try:
            if not await self._tell(supervisor, {"type": "ask", "id": number, "request": request}):
                return {"error": "the agent that keeps the keys is gone"}
            return await question.answer
        finally:
            del self._questions[number]

    async def answer(self, request: Request) -> Reply:
        """From the keys that we keep. Whoever asks may have heard of a new generation a moment before us."""
        generation = _generation_asked_for(request)
        if generation is not None and self._current is not None and generation < self._current.id:
            return {"error": f"generation {generation} is over"}
        return await self._stores.setdefault(generation, KvStore()).answer(request)

    def hear(self, member: int, message: Message) -> None:
        """A question of another agent, or its answer to one of ours."""
        match message:
            case {"type": "ask", "id": number, "request": dict(request)}:
                # Not awaited here: a question may wait for a key that this very peer brings next.
                task = asyncio.ensure_future(self._answer(member, number, request))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case {"type": "answer", "id": int(number), "reply": dict(reply)}:
                question = self._questions.get(number)
                if question is not None and not question.answer.done():
                    question.answer.set_result(reply)

    async def _answer(self, member: int, number: object, request: Request) -> None:
        await self._tell(member, {"type": "answer", "id": number, "reply": await self.answer(request)})

    def _supervisor_of(self, generation: Ballot | None) -> int | None:
        if generation is None:
            return 0
        current = self._current
        return min(current.members) if current is not None and current.id == generation else None

    def _settle(self, error: str, concerns: Callable[[_Question], bool]) -> None:
        for question in self._questions.values():
            if concerns(question) and not question.answer.done():
                question.answer.set_result({"error": error})


def _generation_asked_for(request: Request) -> Ballot | None:
    keys = [request.get("key"), *(request.get("keys") or ())]
    return next((generation_of(key) for key in keys if isinstance(key, str)), None)

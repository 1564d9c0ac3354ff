"""Who keeps which keys, and how a rank's question gets there and back.

Each generation has keys of its own, kept by the agent of its lowest member; a question about an older one is answered
with an error at once. Keys that belong to no generation are kept by the first member for as long as it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.control.channel import Message
from shoal.control.membership.generation import Ballot, Generation
from shoal.control.rankline import generation_of
from shoal.launch.keystore import KeyStore, Reply, Request, derive_key

Tell = Callable[[int, Message], Awaitable[bool]]


@dataclass(frozen=True)
class _Question:
    keeper: int
    generation: Ballot | None
    answer: asyncio.Future[Reply]


class Keyring:
    def __init__(self, me: int, tell: Tell, token: str) -> None:
        self._me = me
        self._token = token
        self._tell = tell
        self._current: Generation | None = None
        self._stores: dict[Ballot | None, KeyStore] = {None: KeyStore()}
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
        self._settle(f"the agent that keeps the keys is gone: {how}", lambda question: question.keeper == member)

    async def ask(self, request: Request) -> Reply:
        """For one of our own ranks."""
        if request.get("op") == "derive":
            return derive_key(self._token, request)
        generation = _generation_asked_for(request)
        keeper = self._keeper_of(generation)
        if keeper is None:
            return {"error": f"nobody keeps the keys of generation {generation}: it is not the one we are in"}
        if keeper == self._me:
            return await self.answer(request)
        self._asked += 1
        number, question = self._asked, _Question(keeper, generation, asyncio.get_running_loop().create_future())
        self._questions[number] = question
        try:
            if not await self._tell(keeper, {"type": "ask", "id": number, "request": request}):
                return {"error": "the agent that keeps the keys is gone"}
            return await question.answer
        finally:
            del self._questions[number]

    async def answer(self, request: Request) -> Reply:
        """From the keys that we keep. Whoever asks may have heard of a new generation a moment before us."""
        generation = _generation_asked_for(request)
        if generation is not None and self._current is not None and generation < self._current.id:
            return {"error": f"generation {generation} is over"}
        return await self._stores.setdefault(generation, KeyStore()).answer(request)

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

    def _keeper_of(self, generation: Ballot | None) -> int | None:
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

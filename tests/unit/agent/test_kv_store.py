"""Who keeps which keys: each generation's lowest member, and nobody when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal.agent.kv_store import KvStoreClient
from shoal.control.channel import Message
from shoal.control.membership.types import Ballot, Generation, Lineage, MemberRanks, State


def generation(number: int, *members: int) -> Generation:
    return Generation(
        id=Ballot(number, members[0]),
        lineage=Lineage(name=Ballot(1, 0)),
        member_ranks=tuple(MemberRanks(member=member, ranks=(0,)) for member in members),
        state=State(step=0),
        source=members[0],
    )


class Pair:
    """Members 1 and 2, whose questions reach each other at once."""

    def __init__(self) -> None:
        self.deaf = False
        self.rings = {me: KvStoreClient(me, self._to(me), "token") for me in (1, 2)}

    def _to(self, me: int) -> Callable[[int, Message], Awaitable[bool]]:
        async def send(member: int, message: Message) -> bool:
            if member not in self.rings:
                return False
            if not self.deaf:
                self.rings[member].on_message(me, message)
            return True

        return send

    def enter(self, entered: Generation) -> None:
        for ring in self.rings.values():
            ring.enter(entered)


def play(scene: Callable[[Pair], Awaitable[None]]) -> None:
    async def begin() -> None:
        await asyncio.wait_for(scene(Pair()), 5)

    asyncio.run(begin())


def test_the_lowest_member_keeps_a_generations_keys() -> None:
    async def scene(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        assert await pair.rings[2].ask({"op": "add", "key": "gen-3-1/a", "amount": 2}) == {"total": 2}
        assert await pair.rings[1].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 3}
        assert await pair.rings[2].ask({"op": "check", "keys": ["gen-3-1/a"]}) == {"there": True}

    play(scene)


def test_an_older_generations_keys_are_gone() -> None:
    async def scene(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        await pair.rings[2].ask({"op": "set", "key": "gen-3-1/a", "value": "YQ=="})
        pair.enter(generation(4, 1, 2))
        for ring in pair.rings.values():
            assert "generation 3-1" in (await ring.ask({"op": "get", "key": "gen-3-1/a"}))["error"]
        assert await pair.rings[2].ask({"op": "get", "key": "gen-4-1/a"}) == {"value": None}

    play(scene)


def test_whoever_hears_of_a_generation_first_may_ask_its_supervisor_already() -> None:
    async def scene(pair: Pair) -> None:
        pair.rings[2].enter(generation(3, 1, 2))
        assert await pair.rings[2].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 1}
        pair.rings[1].enter(generation(3, 1, 2))
        assert await pair.rings[1].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 2}

    play(scene)


def test_a_question_ends_with_its_supervisor_or_its_generation() -> None:
    async def scene(pair: Pair) -> None:
        pair.deaf = True
        pair.enter(generation(3, 1, 2))
        asked = asyncio.ensure_future(pair.rings[2].ask({"op": "get", "key": "gen-3-1/a"}))
        await asyncio.sleep(0)
        pair.rings[2].lose(1, "its connection closed")
        assert (await asked)["error"] == "the agent that keeps the keys is gone: its connection closed"
        asked = asyncio.ensure_future(pair.rings[2].ask({"op": "get", "key": "gen-3-1/a"}))
        await asyncio.sleep(0)
        pair.rings[2].enter(generation(4, 2))
        assert (await asked)["error"] == "that generation is over"

    play(scene)


def test_keys_of_no_generation_are_the_first_members() -> None:
    async def scene(pair: Pair) -> None:
        assert await pair.rings[1].ask({"op": "get", "key": "a"}) == {"error": "the agent that keeps the keys is gone"}
        first = KvStoreClient(0, pair.rings[1]._send, "token")
        assert await first.ask({"op": "get", "key": "a"}) == {"value": None}

    play(scene)


def test_a_key_for_ranks_depends_on_the_token_and_crosses_no_network() -> None:
    async def scene(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        pair.deaf = True
        one, two = [await ring.ask({"op": "derive", "label": "gen-3-1"}) for ring in pair.rings.values()]
        assert one == two
        assert len(one["value"]) == 44
        assert await pair.rings[1].ask({"op": "derive", "label": "gen-4-1"}) != one
        stranger = KvStoreClient(1, pair.rings[1]._send, "another token")
        assert await stranger.ask({"op": "derive", "label": "gen-3-1"}) != one
        # Another agent that asks for it gets an error, whatever it asks for.
        assert "error" in await pair.rings[1].answer({"op": "derive", "label": "gen-3-1"})

    play(scene)

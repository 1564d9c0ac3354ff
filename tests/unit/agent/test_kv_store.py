"""Key-value store: the lowest member of a generation holds its keys, and they are dropped when it ends."""

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
    """Members 1 and 2, whose requests reach each other at once."""

    def __init__(self) -> None:
        self.drops_messages = False
        self.clients = {me: KvStoreClient(me, self._to(me), "token") for me in (1, 2)}

    def _to(self, me: int) -> Callable[[int, Message], Awaitable[bool]]:
        async def send(member: int, message: Message) -> bool:
            if member not in self.clients:
                return False
            if not self.drops_messages:
                self.clients[member].on_message(me, message)
            return True

        return send

    def enter(self, entered: Generation) -> None:
        for client in self.clients.values():
            client.enter(entered)


def run_scenario(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(Pair()), 5)

    asyncio.run(run())


def test_the_lowest_member_holds_the_keys_of_a_generation() -> None:
    async def scenario(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        assert await pair.clients[2].ask({"op": "add", "key": "gen-3-1/a", "amount": 2}) == {"total": 2}
        assert await pair.clients[1].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 3}
        assert await pair.clients[2].ask({"op": "check", "keys": ["gen-3-1/a"]}) == {"there": True}

    run_scenario(scenario)


def test_the_keys_of_an_older_generation_are_dropped() -> None:
    async def scenario(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        await pair.clients[2].ask({"op": "set", "key": "gen-3-1/a", "value": "YQ=="})
        pair.enter(generation(4, 1, 2))
        for client in pair.clients.values():
            assert "generation 3-1" in (await client.ask({"op": "get", "key": "gen-3-1/a"}))["error"]
        assert await pair.clients[2].ask({"op": "get", "key": "gen-4-1/a"}) == {"value": None}

    run_scenario(scenario)


def test_a_member_may_ask_for_keys_before_the_key_holder_enters_the_generation() -> None:
    async def scenario(pair: Pair) -> None:
        pair.clients[2].enter(generation(3, 1, 2))
        assert await pair.clients[2].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 1}
        pair.clients[1].enter(generation(3, 1, 2))
        assert await pair.clients[1].ask({"op": "add", "key": "gen-3-1/a", "amount": 1}) == {"total": 2}

    run_scenario(scenario)


def test_a_request_fails_when_the_key_holder_or_the_generation_ends() -> None:
    async def scenario(pair: Pair) -> None:
        pair.drops_messages = True
        pair.enter(generation(3, 1, 2))
        request = asyncio.ensure_future(pair.clients[2].ask({"op": "get", "key": "gen-3-1/a"}))
        await asyncio.sleep(0)
        pair.clients[2].lose(1, "its connection closed")
        assert (await request)["error"] == "the agent that keeps the keys is gone: its connection closed"
        request = asyncio.ensure_future(pair.clients[2].ask({"op": "get", "key": "gen-3-1/a"}))
        await asyncio.sleep(0)
        pair.clients[2].enter(generation(4, 2))
        assert (await request)["error"] == "that generation is over"

    run_scenario(scenario)


def test_the_first_member_holds_keys_that_belong_to_no_generation() -> None:
    async def scenario(pair: Pair) -> None:
        assert await pair.clients[1].ask({"op": "get", "key": "a"}) == {
            "error": "the agent that keeps the keys is gone"
        }
        first = KvStoreClient(0, pair.clients[1]._send, "token")
        assert await first.ask({"op": "get", "key": "a"}) == {"value": None}

    run_scenario(scenario)


def test_a_derived_key_depends_on_the_token_and_is_never_sent() -> None:
    async def scenario(pair: Pair) -> None:
        pair.enter(generation(3, 1, 2))
        pair.drops_messages = True
        first, second = [await client.ask({"op": "derive", "label": "gen-3-1"}) for client in pair.clients.values()]
        assert first == second
        assert len(first["value"]) == 44
        assert await pair.clients[1].ask({"op": "derive", "label": "gen-4-1"}) != first
        other_run = KvStoreClient(1, pair.clients[1]._send, "another token")
        assert await other_run.ask({"op": "derive", "label": "gen-3-1"}) != first
        # A request of another agent for a derived key gets an error.
        assert "error" in await pair.clients[1].answer({"op": "derive", "label": "gen-3-1"})

    run_scenario(scenario)

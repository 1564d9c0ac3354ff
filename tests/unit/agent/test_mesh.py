"""Mesh of agents: lost, silent, sleeping and absent members, with short deadlines and a controlled clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from shoal.agent import mesh as module
from shoal.agent.mesh import Mesh, to_dial
from shoal.control.channel import Message, dial
from shoal.control.handshake import make_hello
from shoal.control.orders import RosterEntry
from shoal.errors import ControlError
from shoal.host.facts import boot_clock
from tests.support.waiting import wait_until_async

TOKEN = "t" * 64
ME = make_hello(0, "node1", "m", "c", "d")
OLD = "127.0.0.2"
# Less than the 10 s that a whole scenario has.
wait_until = partial(wait_until_async, within_s=5.0)


class Peer:
    """A member in this process that records the callbacks of its mesh."""

    def __init__(self, number: int, cpu: str = "the same", config: str = "c") -> None:
        self.mesh = Mesh(self._receive, lambda member, how: self.lost.append((member, how)), self._note)
        self.received: list[tuple[int, Message]] = []
        self.lost: list[tuple[int, str]] = []
        self.met: list[int] = []
        self.notes: list[str] = []
        self._me = replace(ME, member=number, node=f"node{number + 1}", cpu=cpu, config=config)

    async def listen(self) -> RosterEntry:
        port = await self.mesh.listen("127.0.0.1", self._me, TOKEN)
        return RosterEntry(self._me.node, "127.0.0.1", port, "m")

    async def meet(self, roster: list[RosterEntry]) -> None:
        """Meet the roster like agents of a run that ends when a member is lost."""
        await self.mesh.meet(dict(enumerate(roster)))
        self.mesh.watch()

    async def _receive(self, member: int, message: Message) -> None:
        self.received.append((member, message))

    def _note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIXED_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(module, "FIXED_SILENT_AFTER_S", 0.5)


def run_connected(scenario: Callable[[list[Peer]], Awaitable[None]], peers: list[Peer]) -> None:
    """Connect all peers, run the scenario, close all connections."""

    async def run() -> None:
        roster = [await peer.listen() for peer in peers]
        await asyncio.gather(*(peer.meet(roster) for peer in peers))
        try:
            await scenario(peers)
        finally:
            for peer in peers:
                await peer.mesh.close()
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_every_member_receives_every_message_and_heartbeats_are_not_delivered() -> None:
    async def scenario(peers: list[Peer]) -> None:
        for number, peer in enumerate(peers):
            await peer.mesh.broadcast({"type": "news", "from": number})
        await asyncio.sleep(0.3)
        for number, peer in enumerate(peers):
            others = [other for other in range(3) if other != number]
            assert sorted(peer.received) == [(other, {"type": "news", "from": other}) for other in others]
            assert (peer.lost, peer.notes) == ([], [])

    run_connected(scenario, [Peer(number) for number in range(3)])


def test_a_different_processor_is_noted() -> None:
    async def scenario(peers: list[Peer]) -> None:
        assert peers[0].notes == ["node1 has the same, node2 has another: they compute at different speeds"]

    run_connected(scenario, [Peer(0), Peer(1, cpu="another")])


def test_a_silent_member_is_lost_although_its_connection_is_open() -> None:
    async def scenario(peers: list[Peer]) -> None:
        for task in peers[1].mesh._tasks:
            task.cancel()
        await asyncio.sleep(0.3)
        assert peers[0].lost == []
        await asyncio.sleep(0.6)
        assert peers[0].lost == [(1, "it has sent nothing for 0 s")]
        assert not await peers[0].mesh.send(1, {"type": "news"})

    run_connected(scenario, [Peer(0), Peer(1)])


def test_a_member_that_slept_loses_no_other_member(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(peers: list[Peer]) -> None:
        await asyncio.sleep(0.1)
        monkeypatch.setattr(module, "boot_clock", lambda: boot_clock() + 3600)
        await asyncio.sleep(0.5)
        assert [peer.lost for peer in peers] == [[], []]

    # A busy machine is silent for half a second now and then; the hour of sleep is far longer in any case.
    monkeypatch.setattr(module, "FIXED_SILENT_AFTER_S", 10.0)
    run_connected(scenario, [Peer(0), Peer(1)])


def keep_connected(peers: list[Peer]) -> None:
    for number, peer in enumerate(peers):
        peer.mesh.keep_connected({}, peer.met.append)
        assert sorted(peer.met) == [other for other in range(len(peers)) if other != number]


async def meet_and_keep_connected(peers: list[Peer]) -> None:
    roster = dict(enumerate([await peer.listen() for peer in peers]))
    await asyncio.gather(*(peer.mesh.meet(roster) for peer in peers))
    keep_connected(peers)


def run_scenario(scenario: Callable[[], Awaitable[list[Peer]]]) -> None:
    async def run() -> None:
        for peer in await scenario():
            await peer.mesh.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_lost_connection_is_reestablished() -> None:
    async def scenario() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_connected(peers)
        for channel in peers[0].mesh._channels[1]:
            channel.close()
        await wait_until(lambda: all(peer.lost and len(peer.met) == 2 for peer in peers))
        await send_and_wait(peers[0], 1, peers[1])
        await send_and_wait(peers[1], 0, peers[0])
        return peers

    run_scenario(scenario)


async def send_and_wait(sender: Peer, to: int, receiver: Peer) -> None:
    before = len(receiver.received)
    sender.mesh.post(to, {"type": "news"})
    await wait_until(lambda: len(receiver.received) > before)


def test_a_silent_member_is_not_lost_without_a_watch() -> None:
    async def scenario() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_connected(peers)
        await asyncio.sleep(1.0)
        assert [peer.lost for peer in peers] == [[], []]
        return peers

    run_scenario(scenario)


def test_a_member_that_reconnects_is_not_lost() -> None:
    async def scenario() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_connected(peers)
        for peer in (*peers, *peers):
            peer.mesh.reconnect_all()
            await asyncio.sleep(0.2)
        await wait_until(lambda: all(len(peer.met) >= 4 for peer in peers))
        assert [peer.lost for peer in peers] == [[], []]
        assert [len(peer.mesh._channels[1 - number]) for number, peer in enumerate(peers)] == [2, 2]
        await send_and_wait(peers[0], 1, peers[1])
        await send_and_wait(peers[1], 0, peers[0])
        return peers

    run_scenario(scenario)


def test_a_new_member_is_announced_by_the_member_it_dialled() -> None:
    """The new member has the address of one of the two; the other does not have its address."""

    async def scenario() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_connected(peers)
        joining = Peer(5)
        await joining.listen()
        joining.mesh.keep_connected({0: peers[0].mesh.places[0]}, joining.met.append, dial_all=True)
        await wait_until(lambda: {0, 1} <= set(joining.met) and 5 in peers[0].met and 5 in peers[1].met)
        assert peers[1].mesh.places.name(5) == "node6"
        return [*peers, joining]

    run_scenario(scenario)


def test_a_member_with_another_config_is_refused_and_the_others_stay_connected() -> None:
    async def scenario() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_connected(peers)
        joining = Peer(5, config="another")
        await joining.listen()
        joining.mesh.keep_connected({0: peers[0].mesh.places[0]}, joining.met.append, dial_all=True)
        await wait_until(lambda: peers[0].notes)
        assert peers[0].notes[0].startswith("refused a member: node1 and node6 cannot train together: configuration")
        assert (joining.met, peers[0].lost) == ([], [])
        await send_and_wait(peers[1], 0, peers[0])
        return [*peers, joining]

    run_scenario(scenario)


def test_an_absent_member_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEET_TIMEOUT_S", 0.5)

    async def meet() -> None:
        first, second = Peer(0), Peer(1)
        roster = [await first.listen(), await second.listen(), RosterEntry("node3", "127.0.0.1", 9, "m")]
        with pytest.raises(ControlError, match=r"node1 could not meet node2 \(.*\), node3 \(127.0.0.1:9\)") as caught:
            await first.mesh.meet(dict(enumerate(roster)))
        assert "firewall" in caught.value.why
        assert "ping 127.0.0.1" in caught.value.fix
        for peer in (first, second):
            await peer.mesh.close()

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("addresses", "dials"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], [[], [0], [0, 1]]),
        (["10.0.0.10", "10.0.0.9"], [[1], []]),
        (["9.0.0.1", "10.0.0.1"], [[], [0]]),
        (["127.0.0.1", "127.0.0.1"], [[], [0]]),
        (["fd00::1", "fd00::a"], [[], [0]]),
        (["laptop", "attic"], [[], [0]]),
    ],
)
def test_the_higher_address_dials_and_for_equal_addresses_the_higher_member(
    addresses: list[str], dials: list[list[int]]
) -> None:
    members = dict(enumerate(addresses))
    assert [to_dial(member, members) for member in members] == dials


def test_a_member_that_wakes_in_another_network_is_reached_there() -> None:
    """Its old address is no longer local. It dials the others and sends its new address."""
    has_moved = False

    async def receive(member: int, message: Message) -> None:
        received.append(message)

    async def run() -> None:
        nonlocal has_moved
        here, roster = Peer(0), []
        laptop = Mesh(
            receive, lambda member, how: None, notes.append, lambda address: not (has_moved and address == OLD)
        )
        roster.append(await here.listen())
        me = replace(ME, member=1, node="node2")
        roster.append(RosterEntry("node2", OLD, await laptop.listen(OLD, me, TOKEN), "m"))
        places = dict(enumerate(roster))
        await asyncio.gather(here.mesh.meet(places), laptop.meet(places))
        for mesh in (here.mesh, laptop):
            mesh.keep_connected(places, here.met.append)
        has_moved = True
        await wait_until(lambda: here.mesh.places[1].address != OLD)
        place = here.mesh.places[1]
        assert place.port != roster[1].port
        channel = await dial(place.address, place.port, TOKEN)
        channel.close()
        assert await here.mesh.send(1, {"type": "news"})
        await wait_until(lambda: {"type": "news"} in received)
        for mesh in (here.mesh, laptop):
            await mesh.close()

    received: list[Message] = []
    notes: list[str] = []
    asyncio.run(asyncio.wait_for(run(), 30))
    assert "this machine has another address than before: 127.0.0.1" in notes

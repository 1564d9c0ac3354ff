"""Gone, silent, asleep, absent: what agents make of each other, with the deadlines shortened and the clock in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shoal.agent import mesh as module
from shoal.agent.mesh import Mesh, to_dial
from shoal.control.channel import Message, dial
from shoal.control.handshake import make_hello
from shoal.control.orders import RosterEntry
from shoal.errors import ControlError
from shoal.host.facts import boot_clock

TOKEN = "t" * 64
ME = make_hello(0, "node1", "m", "c", "d")
OLD = "127.0.0.2"


class Peer:
    """One member in this very process; what its mesh says of the others is kept."""

    def __init__(self, number: int, cpu: str = "the same", config: str = "c") -> None:
        self.mesh = Mesh(self._hear, lambda member, how: self.lost.append((member, how)), self._note)
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[tuple[int, str]] = []
        self.met: list[int] = []
        self.notes: list[str] = []
        self._me = replace(ME, member=number, node=f"node{number + 1}", cpu=cpu, config=config)

    async def listen(self) -> RosterEntry:
        port = await self.mesh.listen("127.0.0.1", self._me, TOKEN)
        return RosterEntry(self._me.node, "127.0.0.1", port, "m")

    async def meet(self, roster: list[RosterEntry]) -> None:
        """Like agents of a run that ends when somebody is lost."""
        await self.mesh.meet(dict(enumerate(roster)))
        self.mesh.watch()

    async def _hear(self, member: int, message: Message) -> None:
        self.heard.append((member, message))

    def _note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIXED_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(module, "FIXED_SILENT_AFTER_S", 0.5)


def together(scene: Callable[[list[Peer]], Awaitable[None]], peers: list[Peer]) -> None:
    """Everybody has met when the scene begins; afterwards all connections are closed."""

    async def play() -> None:
        roster = [await peer.listen() for peer in peers]
        await asyncio.gather(*(peer.meet(roster) for peer in peers))
        await scene(peers)
        for peer in peers:
            await peer.mesh.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(play(), 10))


def test_everybody_hears_everybody_and_beats_are_no_messages() -> None:
    async def scene(peers: list[Peer]) -> None:
        for number, peer in enumerate(peers):
            await peer.mesh.broadcast({"type": "news", "from": number})
        await asyncio.sleep(0.3)
        for number, peer in enumerate(peers):
            others = [other for other in range(3) if other != number]
            assert sorted(peer.heard) == [(other, {"type": "news", "from": other}) for other in others]
            assert (peer.lost, peer.notes) == ([], [])

    together(scene, [Peer(number) for number in range(3)])


def test_a_slower_machine_is_remarked() -> None:
    async def scene(peers: list[Peer]) -> None:
        assert peers[0].notes == ["node1 has the same, node2 has another: they compute at different speeds"]

    together(scene, [Peer(0), Peer(1, cpu="another")])


def test_who_falls_silent_is_lost_although_its_connection_stands() -> None:
    async def scene(peers: list[Peer]) -> None:
        for task in peers[1].mesh._tasks:
            task.cancel()
        await asyncio.sleep(0.3)
        assert peers[0].lost == []
        await asyncio.sleep(0.6)
        assert peers[0].lost == [(1, "it has sent nothing for 0 s")]
        assert not await peers[0].mesh.send(1, {"type": "news"})

    together(scene, [Peer(0), Peer(1)])


def test_who_slept_itself_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(peers: list[Peer]) -> None:
        await asyncio.sleep(0.1)
        monkeypatch.setattr(module, "boot_clock", lambda: boot_clock() + 3600)
        await asyncio.sleep(0.5)
        assert [peer.lost for peer in peers] == [[], []]

    together(scene, [Peer(0), Peer(1)])


def in_touch(peers: list[Peer]) -> None:
    for number, peer in enumerate(peers):
        peer.mesh.keep_connected({}, peer.met.append)
        assert sorted(peer.met) == [other for other in range(len(peers)) if other != number]


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0.02)


async def meet_and_keep_up(peers: list[Peer]) -> None:
    roster = dict(enumerate([await peer.listen() for peer in peers]))
    await asyncio.gather(*(peer.mesh.meet(roster) for peer in peers))
    in_touch(peers)


def play(scene: Callable[[], Awaitable[list[Peer]]]) -> None:
    async def begin() -> None:
        for peer in await scene():
            await peer.mesh.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(begin(), 10))


def test_a_lost_connection_is_made_again() -> None:
    async def scene() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_up(peers)
        for channel in peers[0].mesh._channels[1]:
            channel.close()
        await until(lambda: all(peer.lost and len(peer.met) == 2 for peer in peers))
        await until_heard(peers[0], 1, peers[1])
        await until_heard(peers[1], 0, peers[0])
        return peers

    play(scene)


async def until_heard(speaker: Peer, to: int, listener: Peer) -> None:
    before = len(listener.heard)
    speaker.mesh.post(to, {"type": "news"})
    await until(lambda: len(listener.heard) > before)


def test_nobody_is_lost_for_being_silent_where_others_judge() -> None:
    async def scene() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_up(peers)
        await asyncio.sleep(1.0)
        assert [peer.lost for peer in peers] == [[], []]
        return peers

    play(scene)


def test_whoever_dials_anew_is_connected_again_and_lost_to_nobody() -> None:
    async def scene() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_up(peers)
        for peer in (*peers, *peers):
            peer.mesh.reconnect_all()
            await asyncio.sleep(0.2)
        await until(lambda: all(len(peer.met) >= 4 for peer in peers))
        assert [peer.lost for peer in peers] == [[], []]
        assert [len(peer.mesh._channels[1 - number]) for number, peer in enumerate(peers)] == [2, 2]
        await until_heard(peers[0], 1, peers[1])
        await until_heard(peers[1], 0, peers[0])
        return peers

    play(scene)


def test_a_newcomer_is_told_of_by_whom_it_asked() -> None:
    """It knows one of the two, and the other one does not know it."""

    async def scene() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_up(peers)
        guest = Peer(5)
        await guest.listen()
        guest.mesh.keep_connected({0: peers[0].mesh.places[0]}, guest.met.append, dial_all=True)
        await until(lambda: {0, 1} <= set(guest.met) and 5 in peers[0].met and 5 in peers[1].met)
        assert peers[1].mesh.places.name(5) == "node6"
        return [*peers, guest]

    play(scene)


def test_a_member_of_another_config_is_refused_and_harms_nobody() -> None:
    async def scene() -> list[Peer]:
        peers = [Peer(0), Peer(1)]
        await meet_and_keep_up(peers)
        guest = Peer(5, config="another")
        await guest.listen()
        guest.mesh.keep_connected({0: peers[0].mesh.places[0]}, guest.met.append, dial_all=True)
        await until(lambda: peers[0].notes)
        assert peers[0].notes[0].startswith("refused a member: node1 and node6 cannot train together: configuration")
        assert (guest.met, peers[0].lost) == ([], [])
        await until_heard(peers[1], 0, peers[0])
        return [*peers, guest]

    play(scene)


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (["laptop", "desk"], [[], [0]]),
    ],
)
def test_the_higher_address_dials_and_between_equals_the_later_member(
    addresses: list[str], dials: list[list[int]]
) -> None:
    members = dict(enumerate(addresses))
    assert [to_dial(member, members) for member in members] == dials


def test_who_wakes_in_another_network_is_reached_there() -> None:
    """Its old address is not its own any more; it dials, and says where it listens."""
    has_moved = False

    async def hear(member: int, message: Message) -> None:
        heard.append(message)

    async def live() -> None:
        nonlocal has_moved
        here, roster = Peer(0), []
        laptop = Mesh(hear, lambda member, how: None, notes.append, lambda address: not (has_moved and address == OLD))
        roster.append(await here.listen())
        me = replace(ME, member=1, node="node2")
        roster.append(RosterEntry("node2", OLD, await laptop.listen(OLD, me, TOKEN), "m"))
        places = dict(enumerate(roster))
        await asyncio.gather(here.mesh.meet(places), laptop.meet(places))
        for mesh in (here.mesh, laptop):
            mesh.keep_connected(places, here.met.append)
        has_moved = True
        async with asyncio.timeout(10):
            while here.mesh.places[1].address == OLD:
                await asyncio.sleep(0.02)
        place = here.mesh.places[1]
        assert place.port != roster[1].port
        channel = await dial(place.address, place.port, TOKEN)
        channel.close()
        assert await here.mesh.send(1, {"type": "news"})
        async with asyncio.timeout(10):
            while {"type": "news"} not in heard:
                await asyncio.sleep(0.02)
        for mesh in (here.mesh, laptop):
            await mesh.close()

    heard: list[Message] = []
    notes: list[str] = []
    asyncio.run(asyncio.wait_for(live(), 30))
    assert "this machine has another address than before: 127.0.0.1" in notes

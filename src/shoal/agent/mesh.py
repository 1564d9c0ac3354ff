"""Every agent's channels to all the others: who is there, who is gone, who has fallen silent.

Gone and silent differ. A member is gone when it said so or its connection closed; silent when nothing has come from it
for a while, which a cable, a sleeping laptop and a long pause all look like.

In a run whose members come and go (`keep_up`) the mesh judges nobody: it says which connections there are, makes lost
ones again and lets new members in. Otherwise a lost or silent member is lost for good.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from shoal.control.channel import Channel, Message, dial
from shoal.control.connection_guard import connection_guard, receive
from shoal.control.handshake import Hello, refusal, remark
from shoal.control.orders import MOST_PLACES, RosterEntry, read_places
from shoal.errors import ControlError, PeerLost, ShoalError
from shoal.host.facts import boot_clock, can_listen, dial_order

# SECTION launch/places
# Where the members' agents listen, as far as one of them knows. Pure.


def to_dial(me: int, addresses: Mapping[int, str]) -> list[int]:
    """Those below us, by address and then by number. Gloo's ranks dial in the same direction, so a firewall that lets
    a training pass lets its agents pass too."""
    order = {member: (dial_order(address), member) for member, address in addresses.items()}
    return [member for member, place in order.items() if place < order[me]]


class AgentAddresses:
    """`version` grows with every change."""

    def __init__(self) -> None:
        self._known: dict[int, RosterEntry] = {}
        self.version = 0

    def __getitem__(self, member: int) -> RosterEntry:
        return self._known[member]

    def __contains__(self, member: int) -> bool:
        return member in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._known))

    def name(self, member: int) -> str:
        return self._known[member].node if member in self._known else f"machine {member}"

    def update(self, roster: Mapping[int, RosterEntry]) -> None:
        self._known.update(roster)
        self.version += 1

    def of_others(self, me: int) -> dict[int, RosterEntry]:
        return {member: place for member, place in self._known.items() if member != me}

    def addresses(self) -> list[str]:
        return [place.address for place in self._known.values()]

    def ours_to_dial(self, me: Hello) -> list[int]:
        addresses = {member: place.address for member, place in self._known.items()}
        return to_dial(me.member, {**addresses, me.member: me.address})

    def is_reborn(self, theirs: Hello) -> bool:
        """Whether it was started again since we heard of it."""
        known = self._known.get(theirs.member)
        return known is not None and theirs.life > known.life

    def believe(self, theirs: Hello) -> None:
        """What a member says of itself is the newest there is."""
        known = self._known.get(theirs.member)
        ranks = known.ranks if known else ()
        place = RosterEntry(theirs.node, theirs.address, theirs.port, theirs.mark, ranks, theirs.life)
        self.version += place != known
        self._known[theirs.member] = place

    def as_message(self) -> Message:
        return {"type": "places", "places": {str(member): asdict(place) for member, place in self._known.items()}}

    def learn(self, message: Message) -> list[int]:
        """What somebody else knows of newcomers, and of those that came back: whom we had not known so."""
        try:
            told = read_places(message["places"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ControlError("a list of members that cannot be read", why="the other side is not shoal") from None
        news = {
            member: place
            for member, place in told.items()
            if member not in self._known or place.life > self._known[member].life
        }
        if len(self._known.keys() | news.keys()) > MOST_PLACES:
            raise ControlError(f"a list with more than {MOST_PLACES} members", why="the other side is not shoal")
        self._known.update(news)
        self.version += bool(news)
        return list(news)

    def missing(self, me: Hello, here: Iterable[int], within_s: float) -> ControlError:
        there = {me.member, *here}
        absent = [place for member, place in self._known.items() if member not in there]
        names = ", ".join(f"{place.node} ({place.address}:{place.port})" for place in absent)
        return ControlError(
            f"{me.node} could not meet {names} within {within_s:.0f} s",
            why="a firewall drops connections between the machines, or they reach each other by other addresses",
            fix=f"try on {me.node}: ping {absent[0].address}; then open the firewall, or name the right address",
        )


# SECTION launch/listeners
# Where an agent is listened to: at the address of its launch, and where its machine came to be later.


Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listeners:
    """`is_ours`: whether this machine has an address."""

    def __init__(self, welcome: Welcome, is_ours: Callable[[str], bool]) -> None:
        self._welcome = welcome
        self._is_ours = is_ours
        self._servers: list[asyncio.Server] = []
        self._moving = asyncio.Lock()
        self.address = ""
        self.port = 0

    async def open(self, address: str, port: int = 0) -> None:
        """On this one address; the port is the kernel's choice, unless a certain one is wanted and free."""
        try:
            server = await asyncio.start_server(self._welcome, address, port)
        except OSError:
            if not port:
                raise
            server = await asyncio.start_server(self._welcome, address, 0)
        self._servers.append(server)
        self.address, self.port = address, server.sockets[0].getsockname()[1]

    def are_lost(self) -> bool:
        """The machine woke in another network, or its router gave it another address."""
        return bool(self.address) and not self._is_ours(self.address)

    async def follow_to(self, address: str) -> bool:
        """Listens there too, if the address we had is not ours any more."""
        async with self._moving:
            if not self.are_lost():
                return False
            await self.open(address)
            return True

    def close(self) -> None:
        for server in self._servers:
            server.close()


BEAT_S = 1.0
# Long enough for a busy Wi-Fi, short enough that nobody waits minutes for a machine that has left.
SILENT_AFTER_S = 20.0
MEET_WITHIN_S = 20.0
HELLO_WITHIN_S = 5.0
_AGAIN_S = 0.2
# Who refuses us will not change its mind soon.
_REFUSED_AGAIN_S, _CONNECT_WITHIN_S = 2.0, 2.0
_DIAL_SILENT_AFTER_S = 2.5
# Two that dial each other at once make two connections, and each may hold the other one for the newer: both stay.
_MOST_CHANNELS = 2
# What waits for a connection that takes nothing: beyond this, it is said again later or not at all.
_MOST_WAITING = 256

OnMessage = Callable[[int, Message], Awaitable[None]]
OnLost = Callable[[int, str], None]
OnConnected = Callable[[int], None]


class Mesh:
    def __init__(
        self,
        on_message: OnMessage,
        on_lost: OnLost,
        note: Callable[[str], None],
        is_ours: Callable[[str], bool] = can_listen,
    ) -> None:
        self.places = AgentAddresses()
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_connected: OnConnected | None = None
        self._note = note
        self._channels: dict[int, list[Channel]] = {}
        self._waiting: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialling: set[int] = set()
        self._remarks: set[str] = set()
        self._arrived = asyncio.Condition()
        self._refused: ShoalError | None = None
        self._listeners = Listeners(self._welcome, is_ours)
        self._met = False
        self._door = connection_guard(note)

    async def listen(self, address: str, me: Hello, token: str, port: int = 0) -> int:
        """On this one address. Whoever comes back listens where it did before: others may have been away as well, and
        know of no other place."""
        self._token = token
        await self._listeners.open(address, port)
        self._introduce_as(me)
        return self._listeners.port

    def _introduce_as(self, me: Hello) -> None:
        self._me = replace(me, address=self._listeners.address, port=self._listeners.port)
        self.places.believe(self._me)

    async def meet(self, roster: Mapping[int, RosterEntry]) -> None:
        """Until every member is connected; who does not come is named."""
        self.places.update(roster)
        self._door.expect(self.places.addresses())
        for member in self.places.ours_to_dial(self._me):
            self._spawn(self._dial_until_met(member))
        try:
            async with asyncio.timeout(MEET_WITHIN_S), self._arrived:
                await self._arrived.wait_for(lambda: self._refused or len(self._channels) == len(roster) - 1)
        except TimeoutError:
            raise self.places.missing(self._me, self._channels, MEET_WITHIN_S) from None
        if self._refused:
            raise self._refused
        self._met = True

    def watch(self) -> None:
        """From now on whoever closes its connection or falls silent is lost, once and for good."""
        self._spawn(self._beat())

    def keep_up(self, roster: Mapping[int, RosterEntry], on_connected: OnConnected, dial_all: bool = False) -> None:
        """From now on connections come and go. `dial_all`: whoever comes back dials everybody, since nobody knows where
        it listens."""
        self._met = True
        self.places.update(roster)
        self._door.expect(self.places.addresses())
        self._on_connected = on_connected
        for member in list(self._channels):
            on_connected(member)
        self._spawn(self._dial_the_lost(dial_all))

    def dial_anew(self) -> None:
        """After a sleep, or in another network: our connections may be dead without having been closed."""
        for member in self.places:
            self._dial_once_more(member)

    async def tell(self, member: int, message: Message) -> bool:
        """Whether it could be said. A member that is gone is told nothing; its loss is reported elsewhere."""
        if channels := self._channels.get(member):
            with contextlib.suppress(OSError):
                await channels[-1].send(message)
                return True
        return False

    def post(self, member: int, message: Message) -> None:
        """Said in its turn, without waiting for it; dropped when there is no connection, or one that takes nothing."""
        if member in self._channels and self._waiting.get(member, 0) < _MOST_WAITING:
            self._waiting[member] = self._waiting.get(member, 0) + 1
            self._spawn(self._say_in_turn(member, self._channels[member][-1], message))

    async def tell_all(self, message: Message) -> None:
        for member in list(self._channels):
            if self._on_connected is None:
                await self.tell(member, message)
            else:
                self.post(member, message)

    async def close(self) -> None:
        # What was posted last is said, if the other side takes it at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):
                while any(self._waiting.values()):
                    await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        for channels in self._channels.values():
            for channel in channels:
                channel.close()
        self._listeners.close()
        self._door.sum_up()

    async def _say_in_turn(self, member: int, channel: Channel, message: Message) -> None:
        try:
            with contextlib.suppress(OSError):
                await channel.send(message)
        finally:
            self._waiting[member] -= 1

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A stranger costs us five seconds of a task and learns nothing."""
        channel = await receive(reader, writer, self._token, self._door)
        if channel is None:
            return
        try:
            await self._exchange_hellos(channel)
        except (ControlError, OSError, EOFError) as error:
            if isinstance(error, ControlError):
                self._note(f"refused a connection from {writer.get_extra_info('peername')[0]}: {error.seen}")
            channel.close()

    async def _dial_until_met(self, member: int) -> None:
        """Again and again until `meet` gives up: the other agent may be a moment behind us."""
        place = self.places[member]
        while not self._met and member not in self._channels and self._refused is None:
            try:
                await self._exchange_hellos(await dial(place.address, place.port, self._token))
            except ControlError as error:
                await self.give_up(error)
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(_AGAIN_S)

    async def _dial_the_lost(self, dial_all: bool) -> None:
        while True:
            if self._listeners.are_lost():
                self.dial_anew()
            for member in self.places if dial_all else self.places.ours_to_dial(self._me):
                if member not in self._channels or self._is_silent(member):
                    self._dial_once_more(member)
            await asyncio.sleep(_AGAIN_S)

    def _is_silent(self, member: int) -> bool:
        """A connection over which nothing came for a while may take as long again to notice that the cable is back: the
        kernel waits longer each time before it repeats what was lost. A new one does not."""
        return boot_clock() - self._heard_at.get(member, 0.0) > _DIAL_SILENT_AFTER_S

    def _dial_once_more(self, member: int) -> None:
        if member != self._me.member and member not in self._dialling:
            self._dialling.add(member)
            self._spawn(self._try_to_dial(member, self.places[member]))

    async def _try_to_dial(self, member: int, place: RosterEntry) -> None:
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                channel = await dial(place.address, place.port, self._token)
            if await self._listeners.follow_to(channel.own_address()):
                self._introduce_as(self._me)
                self._note(f"this machine has another address than before: {self._me.address}")
            await self._exchange_hellos(channel)
        except ControlError as error:
            self._remark(f"cannot connect with {place.node} again: {error.seen}")
            await asyncio.sleep(_REFUSED_AGAIN_S)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._dialling.discard(member)

    async def _exchange_hellos(self, channel: Channel) -> None:
        await channel.send(self._me.as_dict())
        async with asyncio.timeout(HELLO_WITHIN_S):
            theirs = Hello.from_dict(await channel.receive())
        if error := refusal(self._me, theirs) or self._is_taken(theirs):
            await self._refuse(channel, error)
            return
        if words := remark(self._me, theirs):
            self._remark(words)
        async with self._arrived:
            self._add(theirs, channel)
            self._arrived.notify_all()
        self._spawn(self._listen_to(theirs.member, channel))
        if self._on_connected is not None:
            self._on_connected(theirs.member)
            self.post(theirs.member, self.places.as_message())

    def _is_taken(self, theirs: Hello) -> ControlError | None:
        if theirs.member != self._me.member:
            return None
        return ControlError(
            f"{theirs.node} says that it is {self._me.node}",
            why="the agent of one machine was started twice",
            fix="end one of them",
        )

    async def _refuse(self, channel: Channel, error: ControlError) -> None:
        """Before the run has begun, that ends it; later it is the other one's trouble alone."""
        if self._met:
            self._remark(f"refused a member: {error.seen}")
        else:
            await self.give_up(error)
        channel.close()

    def _add(self, theirs: Hello, channel: Channel) -> None:
        # What still waits in an old connection was said long ago, and must not be heard after what is said now.
        member, is_stale = theirs.member, self.places.is_reborn(theirs) or self._is_silent(theirs.member)
        channels = self._channels.setdefault(member, [])
        for older in channels if is_stale else channels[: 1 - _MOST_CHANNELS]:
            older.close()
        self._channels[member] = [] if is_stale else channels[1 - _MOST_CHANNELS :]
        self._channels[member].append(channel)
        self._heard_at[member] = boot_clock()
        self.places.believe(theirs)
        self._door.expect(self.places.addresses())

    async def give_up(self, error: ShoalError) -> None:
        """Whoever waits in `meet` need wait no longer. Afterwards it changes nothing."""
        async with self._arrived:
            self._refused = self._refused or error
            self._arrived.notify_all()

    async def _listen_to(self, member: int, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                self._heard_at[member] = boot_clock()
                if message.get("type") == "places":
                    for newcomer in self.places.learn(message):
                        self._dial_once_more(newcomer)
                elif message.get("type") != "beat":
                    await self._on_message(member, message)
        except (OSError, EOFError):
            self._lose(member, "its agent's connection closed", channel)
        except ControlError as error:
            self._lose(member, error.seen, channel)

    async def _beat(self) -> None:
        """Whoever slept itself hears its peers first before it judges them."""
        looked_at = boot_clock()
        while True:
            await asyncio.sleep(BEAT_S)
            now = boot_clock()
            if now - looked_at < 5 * BEAT_S:
                for member, heard_at in list(self._heard_at.items()):
                    if now - heard_at > SILENT_AFTER_S:
                        self._lose(member, f"it has not been heard of for {SILENT_AFTER_S:.0f} s")
            looked_at = now
            self._door.look()
            for member in list(self._channels):
                # Not awaited in turn: a full connection to a silent peer must not keep us from the others.
                self._spawn(self.tell(member, {"type": "beat"}))

    def _lose(self, member: int, how: str, of: Channel | None = None) -> None:
        """A connection that a newer one has replaced, or that has a twin, loses nobody."""
        channels = self._channels.get(member, [])
        if of is not None:
            of.close()
        if of is not None and (of not in channels or len(channels) > 1):
            self._channels[member] = [channel for channel in channels if channel is not of]
            if not self._channels[member]:
                del self._channels[member]
            return
        self._heard_at.pop(member, None)
        if self._channels.pop(member, None) is None:
            return
        for channel in channels:
            channel.close()
        if self._met:
            self._on_lost(member, how)
        else:
            # Nobody comes back: to wait for it would only cost time.
            node = self.places[member].node
            self._spawn(self.give_up(PeerLost(f"{node} left before the ranks were started", why=how)))

    def _remark(self, text: str) -> None:
        """Once, however often it is true."""
        if text not in self._remarks:
            self._remarks.add(text)
            self._note(text)

    def _spawn(self, work: Coroutine[None, None, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

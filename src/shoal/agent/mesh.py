"""Connections of one agent to all others: listening, dialling, reconnecting, and the loss of peers.

In a fixed run (`watch`) a member is lost for good when its connection closes or it falls silent. In an elastic run
(`keep_connected`) the mesh judges no peer: it reports which connections exist, makes lost ones again and accepts new
members; the membership state machine decides who takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from shoal.config.defaults import SILENT_AFTER_S
from shoal.control.channel import Channel, Message, dial
from shoal.control.connection_guard import accept_connection, make_connection_guard
from shoal.control.handshake import Hello, describe_cpu_difference, find_mismatch
from shoal.control.membership.settings import (
    CONNECT_TIMEOUT_S,
    FIXED_HEARTBEAT_S,
    FIXED_SILENT_AFTER_S,
    HELLO_TIMEOUT_S,
    MEET_TIMEOUT_S,
    RECONNECT_S,
    REFUSED_RECONNECT_S,
)
from shoal.control.orders import MAX_MEMBERS_LISTED, RosterEntry, read_places
from shoal.errors import ControlError, PeerLost, ShoalError
from shoal.host.facts import boot_clock, can_listen, dial_priority

# Two agents that dial each other at once make two connections, and each may take another one for the newer: keep both.
_MAX_CHANNELS = 2
# Messages that wait for a connection that accepts none; further ones are dropped, and repeated later if they matter.
_MAX_UNSENT = 256

OnMessage = Callable[[int, Message], Awaitable[None]]
OnLost = Callable[[int, str], None]
OnConnected = Callable[[int], None]
OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class BackgroundTasks:
    """Tasks that nothing awaits; asyncio itself keeps only weak references to them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def spawn(self, work: Coroutine[None, None, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Mesh:
    def __init__(
        self,
        on_message: OnMessage,
        on_lost: OnLost,
        note: Callable[[str], None],
        is_own_address: Callable[[str], bool] = can_listen,
    ) -> None:
        self.places = AgentAddresses()
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_connected: OnConnected | None = None
        self._note = note
        self._tasks = BackgroundTasks()
        self._channels = MemberChannels(self._tasks)
        self._dialling: set[int] = set()
        self._noted: set[str] = set()
        self._meeting = Meeting()
        self._listeners = Listeners(self._on_connection, is_own_address)
        self._watching: asyncio.Task[Any] | None = None
        self._guard = make_connection_guard(note)

    # Beginning.

    async def listen(self, address: str, me: Hello, token: str, port: int = 0) -> int:
        """Listen on this address. A restarted agent listens at its old port, the only one that others may know."""
        self._token = token
        await self._listeners.open(address, port)
        self._set_hello(me)
        return self._listeners.port

    def _set_hello(self, me: Hello) -> None:
        self._me = replace(me, address=self._listeners.address, port=self._listeners.port)
        self.places.update_from(self._me)

    async def meet(self, roster: Mapping[int, RosterEntry]) -> None:
        """Wait until every member is connected; the error names the missing ones."""
        self._set_roster(roster)
        for member in self.places.to_dial(self._me):
            self._tasks.spawn(self._dial_until_met(member))
        try:
            await self._meeting.wait(lambda: len(self._channels) == len(roster) - 1)
        except TimeoutError:
            raise self.places.missing(self._me, self._channels, MEET_TIMEOUT_S) from None

    async def give_up(self, error: ShoalError) -> None:
        """Make `meet` raise this error. Afterwards it changes nothing."""
        await self._meeting.give_up(error)

    def watch(self) -> None:
        """From now on a member whose connection closes or that falls silent is lost for good."""
        self._watching = self._tasks.spawn(self._send_heartbeats())

    def keep_connected(
        self,
        roster: Mapping[int, RosterEntry],
        on_connected: OnConnected,
        silent_after_s: float = SILENT_AFTER_S,
        dial_all: bool = False,
    ) -> None:
        """From now on reconnect to members whose connection is lost or silent.

        `silent_after_s`: when a member counts as silent. A silent connection is replaced then, or after the default if
        that is shorter: the new one is to notice a returned link before the member counts as silent.
        `dial_all`: a joining or restarted agent dials every member, because none of them knows its address.
        """
        if self._watching is not None:
            self._watching.cancel()
        self._channels.redial_after_s = min(silent_after_s, SILENT_AFTER_S)
        self._meeting.is_over = True
        self._set_roster(roster)
        self._on_connected = on_connected
        for member in self._channels:
            on_connected(member)
        self._tasks.spawn(self._dial_missing(dial_all))

    def _set_roster(self, roster: Mapping[int, RosterEntry]) -> None:
        self.places.update(roster)
        self._guard.expect(self.places.addresses())

    # Sending.

    async def send(self, member: int, message: Message) -> bool:
        """Return whether the message could be sent. The loss of a member is reported elsewhere."""
        return await self._channels.send(member, message)

    def post(self, member: int, message: Message) -> None:
        """Send in order, without waiting; drop it when there is no connection, or one that accepts nothing."""
        self._channels.post(member, message)

    async def broadcast(self, message: Message) -> None:
        for member in self._channels:
            if self._on_connected is None:
                await self.send(member, message)
            else:
                self.post(member, message)

    async def close(self) -> None:
        await self._channels.flush()
        for task in self._tasks:
            task.cancel()
        self._channels.close()
        self._listeners.close()
        self._guard.sum_up()

    # Connecting.

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve an incoming connection; one without the token costs a task for five seconds and learns nothing."""
        channel = await accept_connection(reader, writer, self._token, self._guard)
        if channel is None:
            return
        try:
            await self._exchange_hellos(channel)
        except (ControlError, OSError, EOFError) as error:
            if isinstance(error, ControlError):
                self._note(f"refused a connection from {writer.get_extra_info('peername')[0]}: {error.seen}")
            channel.close()

    async def _dial_until_met(self, member: int) -> None:
        """Dial until `meet` ends: the other agent may start a moment later."""
        place = self.places[member]
        while member not in self._channels and self._meeting.is_open():
            try:
                await self._exchange_hellos(await dial(place.address, place.port, self._token))
            except ControlError as error:
                await self.give_up(error)
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(RECONNECT_S)

    async def _dial_missing(self, dial_all: bool) -> None:
        while True:
            if self._listeners.has_lost_address():
                self.reconnect_all()
            for member in self.places if dial_all else self.places.to_dial(self._me):
                if member not in self._channels or self._channels.is_silent(member):
                    self._start_dialling(member)
            await asyncio.sleep(RECONNECT_S)

    def reconnect_all(self) -> None:
        """Dial all members after a sleep or in another network: connections may be dead without being closed."""
        for member in self.places:
            self._start_dialling(member)

    def _start_dialling(self, member: int) -> None:
        if member != self._me.member and member not in self._dialling:
            self._dialling.add(member)
            self._tasks.spawn(self._dial(member, self.places[member]))

    async def _dial(self, member: int, place: RosterEntry) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                channel = await dial(place.address, place.port, self._token)
            if await self._listeners.follow_to(channel.own_address()):
                self._set_hello(self._me)
                self._note(f"this machine has another address than before: {self._me.address}")
            await self._exchange_hellos(channel)
        except ControlError as error:
            self._note_once(f"cannot connect with {place.node} again: {error.seen}")
            await asyncio.sleep(REFUSED_RECONNECT_S)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._dialling.discard(member)

    async def _exchange_hellos(self, channel: Channel) -> None:
        await channel.send(asdict(self._me))
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = Hello.from_dict(await channel.receive())
        if error := find_mismatch(self._me, hello) or self._check_id(hello):
            # Before the run has begun this ends it; later it concerns only the other node.
            if self._meeting.is_over:
                self._note_once(f"refused a member: {error.seen}")
            else:
                await self.give_up(error)
            channel.close()
            return
        if text := describe_cpu_difference(self._me, hello):
            self._note_once(text)
        async with self._meeting.arrival():
            self._channels.add(hello.member, channel, is_stale=self.places.has_restarted(hello))
            self.places.update_from(hello)
            self._guard.expect(self.places.addresses())
        self._tasks.spawn(self._listen_to(hello.member, channel))
        if self._on_connected is not None:
            self._on_connected(hello.member)
            self.post(hello.member, self.places.as_message())

    def _check_id(self, hello: Hello) -> ControlError | None:
        if hello.member != self._me.member:
            return None
        return ControlError(
            f"{hello.node} has the same member id as {self._me.node}",
            why="the agent of one machine was started twice",
            fix="end one of them",
        )

    # Receiving and losing.

    async def _listen_to(self, member: int, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                self._channels.record_message(member)
                if message.get("type") == "places":
                    for changed in self.places.learn(message):
                        self._start_dialling(changed)
                elif message.get("type") != "beat":
                    await self._on_message(member, message)
        except (OSError, EOFError):
            self._lose(member, "its agent's connection closed", channel)
        except ControlError as error:
            self._lose(member, error.seen, channel)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats and drop silent members; after a sleep of this machine, listen before judging others."""
        last_at = boot_clock()
        while True:
            await asyncio.sleep(FIXED_HEARTBEAT_S)
            now = boot_clock()
            if now - last_at < 5 * FIXED_HEARTBEAT_S:
                for member in self._channels:
                    if self._channels.silent_s(member, now) > FIXED_SILENT_AFTER_S:
                        self._lose(member, f"it has sent nothing for {FIXED_SILENT_AFTER_S:.0f} s")
            last_at = now
            self._guard.look()
            for member in self._channels:
                # Not awaited in turn: a full connection to a silent peer must not delay the others.
                self._tasks.spawn(self.send(member, {"type": "beat"}))

    def _lose(self, member: int, how: str, of: Channel | None = None) -> None:
        """Report a member as lost, unless the closed connection was replaced or has a twin."""
        if not self._channels.remove(member, of):
            return
        if self._meeting.is_over:
            self._on_lost(member, how)
        else:
            # Before the start a lost member does not return: waiting for it would only cost time.
            node = self.places[member].node
            self._tasks.spawn(self.give_up(PeerLost(f"{node} left before the ranks were started", why=how)))

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)


class Meeting:
    """The wait, before the ranks start, until all agents of a launch are connected."""

    def __init__(self) -> None:
        self.is_over = False  # all were connected, or the others train already
        self._refused: ShoalError | None = None
        self._changed = asyncio.Condition()

    def is_open(self) -> bool:
        return not self.is_over and self._refused is None

    async def wait(self, is_complete: Callable[[], bool]) -> None:
        """Return once the meeting is complete; raise why it cannot be, or TimeoutError."""
        async with asyncio.timeout(MEET_TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self._refused or is_complete())
        if self._refused:
            raise self._refused
        self.is_over = True

    async def give_up(self, error: ShoalError) -> None:
        async with self._changed:
            self._refused = self._refused or error
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def arrival(self) -> AsyncIterator[None]:
        """Look again, after the body, whether the meeting is complete."""
        async with self._changed:
            yield
            self._changed.notify_all()


class MemberChannels:
    """The connections to each member, the newest last, and when the member last sent something."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._channels: dict[int, list[Channel]] = {}
        self._unsent: dict[int, int] = {}
        self._received_at: dict[int, float] = {}
        self.redial_after_s = SILENT_AFTER_S

    def __contains__(self, member: object) -> bool:
        return member in self._channels

    def __len__(self) -> int:
        return len(self._channels)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._channels))

    def __getitem__(self, member: int) -> list[Channel]:
        return self._channels[member]

    async def send(self, member: int, message: Message) -> bool:
        if channels := self._channels.get(member):
            with contextlib.suppress(OSError):
                await channels[-1].send(message)
                return True
        return False

    def post(self, member: int, message: Message) -> None:
        if member in self._channels and self._unsent.get(member, 0) < _MAX_UNSENT:
            self._unsent[member] = self._unsent.get(member, 0) + 1
            self._tasks.spawn(self._send_posted(member, self._channels[member][-1], message))

    async def _send_posted(self, member: int, channel: Channel, message: Message) -> None:
        try:
            with contextlib.suppress(OSError):
                await channel.send(message)
        finally:
            self._unsent[member] -= 1

    def record_message(self, member: int) -> None:
        self._received_at[member] = boot_clock()

    def silent_s(self, member: int, now: float) -> float:
        return now - self._received_at.get(member, 0.0)

    def is_silent(self, member: int) -> bool:
        """Whether to replace the connection: after silence the kernel waits ever longer before it sends again, so a
        new connection notices earlier that a cable is back."""
        return self.silent_s(member, boot_clock()) > self.redial_after_s

    def add(self, member: int, channel: Channel, is_stale: bool) -> None:
        """Add a connection; `is_stale`: the older ones belong to an agent that was restarted."""
        # Messages that still wait in an old connection must not arrive after those of the new one.
        is_stale |= self.is_silent(member)
        channels = self._channels.get(member, [])
        for older in channels if is_stale else channels[: 1 - _MAX_CHANNELS]:
            older.close()
        self._channels[member] = [*([] if is_stale else channels[1 - _MAX_CHANNELS :]), channel]
        self.record_message(member)

    def remove(self, member: int, of: Channel | None) -> bool:
        """Close one connection of a member, or all; return whether it had one and has none now.

        False also for one that was replaced before.
        """
        channels = self._channels.get(member, [])
        if of is not None:
            of.close()
        if of is not None and (of not in channels or len(channels) > 1):
            self._channels[member] = [channel for channel in channels if channel is not of]
            if not self._channels[member]:
                del self._channels[member]
            return False
        self._received_at.pop(member, None)
        if self._channels.pop(member, None) is None:
            return False
        for channel in channels:
            channel.close()
        return True

    async def flush(self) -> None:
        """Send what was posted last, if the other side accepts it at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S):
                while any(self._unsent.values()):
                    await asyncio.sleep(0.01)

    def close(self) -> None:
        for channels in self._channels.values():
            for channel in channels:
                channel.close()


class AgentAddresses:
    """Where the members' agents listen, as far as this agent knows. Pure."""

    def __init__(self) -> None:
        self._known: dict[int, RosterEntry] = {}
        self.version = 0  # grows with every change

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

    def to_dial(self, me: Hello) -> list[int]:
        addresses = {member: place.address for member, place in self._known.items()}
        return to_dial(me.member, {**addresses, me.member: me.address})

    def has_restarted(self, hello: Hello) -> bool:
        """Return whether the agent was restarted since this one learnt of it."""
        known = self._known.get(hello.member)
        return known is not None and hello.life > known.life

    def update_from(self, hello: Hello) -> None:
        """Record what a member reports of itself, which is always the newest."""
        known = self._known.get(hello.member)
        ranks = known.ranks if known else ()
        place = RosterEntry(hello.node, hello.address, hello.port, hello.mark, ranks, hello.life)
        self.version += place != known
        self._known[hello.member] = place

    def as_message(self) -> Message:
        return {"type": "places", "places": {str(member): asdict(place) for member, place in self._known.items()}}

    def learn(self, message: Message) -> list[int]:
        """Add what another agent knows; return the members that are new here or have restarted."""
        try:
            received = read_places(message["places"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ControlError("a list of members that cannot be read", why="the other side is not shoal") from None
        news = {
            member: place
            for member, place in received.items()
            if member not in self._known or place.life > self._known[member].life
        }
        if len(self._known.keys() | news.keys()) > MAX_MEMBERS_LISTED:
            raise ControlError(f"a list with more than {MAX_MEMBERS_LISTED} members", why="the other side is not shoal")
        self._known.update(news)
        self.version += bool(news)
        return list(news)

    def missing(self, me: Hello, connected: Iterable[int], within_s: float) -> ControlError:
        present = {me.member, *connected}
        absent = [place for member, place in self._known.items() if member not in present]
        names = ", ".join(f"{place.node} ({place.address}:{place.port})" for place in absent)
        return ControlError(
            f"{me.node} could not meet {names} within {within_s:.0f} s",
            why="a firewall drops connections between the machines, or they reach each other by other addresses",
            fix=f"try on {me.node}: ping {absent[0].address}; then open the firewall, or name the right address",
        )


def to_dial(me: int, addresses: Mapping[int, str]) -> list[int]:
    """Return the members that this one dials: those below it, by address and then by id.

    Gloo's ranks dial in the same direction, so a firewall that lets a training pass lets its agents pass too.
    """
    order = {member: (dial_priority(address), member) for member, address in addresses.items()}
    return [member for member, place in order.items() if place < order[me]]


class Listeners:
    """The listening sockets of an agent: at the address of its launch, and at those its machine got later."""

    def __init__(self, on_connection: OnConnection, is_own_address: Callable[[str], bool]) -> None:
        self._on_connection = on_connection
        self._is_own_address = is_own_address  # whether this machine has an address
        self._servers: list[asyncio.Server] = []
        self._moving = asyncio.Lock()
        self.address = ""
        self.port = 0

    async def open(self, address: str, port: int = 0) -> None:
        """Listen on this address; on `port` if it is free, otherwise on one that the kernel chooses."""
        try:
            server = await asyncio.start_server(self._on_connection, address, port)
        except OSError:
            if not port:
                raise
            server = await asyncio.start_server(self._on_connection, address, 0)
        self._servers.append(server)
        self.address, self.port = address, server.sockets[0].getsockname()[1]

    def has_lost_address(self) -> bool:
        """Return whether the machine woke in another network, or its router gave it another address."""
        return bool(self.address) and not self._is_own_address(self.address)

    async def follow_to(self, address: str) -> bool:
        """Listen at this address too, if the old one is lost; return whether this was done."""
        async with self._moving:
            if not self.has_lost_address():
                return False
            await self.open(address)
            return True

    def close(self) -> None:
        for server in self._servers:
            server.close()

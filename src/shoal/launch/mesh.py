"""Every agent's channels to all the others: who is there, who is gone, who has fallen silent.

Gone and silent differ. A member is gone when it said so or its connection closed; silent when nothing has come from it
for a while, which a cable, a sleeping laptop and a long pause all look like.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from shoal.control.channel import Channel, Message, dial
from shoal.control.hello import Hello, refusal, remark
from shoal.control.machine import boot_clock
from shoal.control.reception import doorkeeper, receive
from shoal.control.route import dial_order
from shoal.errors import ControlError, PeerLost, ShoalError
from shoal.launch.orders import Member

BEAT_S = 1.0
# Long enough for a busy Wi-Fi, short enough that nobody waits minutes for a machine that has left.
SILENT_AFTER_S = 20.0
MEET_WITHIN_S = 20.0
HELLO_WITHIN_S = 5.0
_AGAIN_S = 0.2

OnMessage = Callable[[int, Message], Awaitable[None]]
OnLost = Callable[[int, str], None]


def to_dial(me: int, addresses: Sequence[str]) -> list[int]:
    """Those below us, by address and then by number. Gloo's ranks dial in the same direction, so a firewall that lets
    a training pass lets its agents pass too."""
    order = [(dial_order(address), member) for member, address in enumerate(addresses)]
    return [member for member, place in enumerate(order) if place < order[me]]


class Mesh:
    def __init__(self, on_message: OnMessage, on_lost: OnLost, note: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._note = note
        self._channels: dict[int, Channel] = {}
        self._heard_at: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._arrived = asyncio.Condition()
        self._refused: ShoalError | None = None
        self._server: asyncio.Server | None = None
        self._expected: list[Member] = []
        self._met = False
        self._door = doorkeeper(note)

    async def listen(self, address: str, me: Hello, token: str) -> int:
        """On this one address; the port is the kernel's choice."""
        self._me = me
        self._token = token
        self._server = await asyncio.start_server(self._welcome, address, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def meet(self, roster: Sequence[Member]) -> None:
        """Until every member is connected; who does not come is named."""
        self._expected = list(roster)
        self._door.expect(place.address for place in roster)
        for member in to_dial(self._me.member, [place.address for place in roster]):
            self._spawn(self._dial(member, roster[member]))
        try:
            async with asyncio.timeout(MEET_WITHIN_S), self._arrived:
                await self._arrived.wait_for(lambda: self._refused or len(self._channels) == len(roster) - 1)
        except TimeoutError:
            raise self._missing() from None
        if self._refused:
            raise self._refused
        self._met = True
        self._spawn(self._beat())

    async def tell(self, member: int, message: Message) -> bool:
        """Whether it could be said. A member that is gone is told nothing; its loss is reported elsewhere."""
        channel = self._channels.get(member)
        if channel is not None:
            with contextlib.suppress(OSError):
                await channel.send(message)
                return True
        return False

    async def tell_all(self, message: Message) -> None:
        for member in list(self._channels):
            await self.tell(member, message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for channel in self._channels.values():
            channel.close()
        if self._server is not None:
            self._server.close()
        self._door.sum_up()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A stranger costs us five seconds of a task and learns nothing."""
        channel = await receive(reader, writer, self._token, self._door)
        if channel is None:
            return
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                await self._exchange_hellos(channel)
        except (ControlError, OSError, EOFError) as error:
            if isinstance(error, ControlError):
                self._note(f"refused a connection from {writer.get_extra_info('peername')[0]}: {error.seen}")
            channel.close()

    async def _dial(self, member: int, place: Member) -> None:
        """Again and again until `meet` gives up: the other agent may be a moment behind us."""
        while member not in self._channels and self._refused is None:
            try:
                await self._exchange_hellos(await dial(place.address, place.port, self._token))
            except ControlError as error:
                await self.give_up(error)
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(_AGAIN_S)

    async def _exchange_hellos(self, channel: Channel) -> None:
        await channel.send(self._me.as_dict())
        theirs = Hello.from_dict(await channel.receive())
        if error := refusal(self._me, theirs):
            await self.give_up(error)
            channel.close()
            return
        if words := remark(self._me, theirs):
            self._note(words)
        async with self._arrived:
            self._channels[theirs.member] = channel
            self._heard_at[theirs.member] = boot_clock()
            self._names[theirs.member] = theirs.node
            self._arrived.notify_all()
        self._spawn(self._listen_to(theirs.member, channel))

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
                if message.get("type") != "beat":
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
        """An older connection that a newer one has replaced loses nobody."""
        if of is not None and self._channels.get(member) is not of:
            return
        self._heard_at.pop(member, None)
        channel = self._channels.pop(member, None)
        if channel is None:
            return
        channel.close()
        if self._met:
            self._on_lost(member, how)
        else:
            # Nobody comes back: to wait for it would only cost time.
            self._spawn(self.give_up(PeerLost(f"{self._names[member]} left before the ranks were started", why=how)))

    def _missing(self) -> ControlError:
        absent = [
            place
            for member, place in enumerate(self._expected)
            if member != self._me.member and member not in self._channels
        ]
        names = ", ".join(f"{place.node} ({place.address}:{place.port})" for place in absent)
        return ControlError(
            f"{self._me.node} could not meet {names} within {MEET_WITHIN_S:.0f} s",
            why="a firewall drops connections between the machines, or they reach each other by other addresses",
            fix=f"try on {self._me.node}: ping {absent[0].address}; then open the firewall, or name the right address",
        )

    def _spawn(self, work: Coroutine[None, None, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

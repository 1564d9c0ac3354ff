"""Where machines that come by themselves are received: one after another, each with a code that works once."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Collection

from shoal.cluster.cargo import Cargo
from shoal.cluster.join.guest import Guest
from shoal.cluster.join.invitation import Invitation, make_code
from shoal.control.channel import Channel
from shoal.control.hello import Hello, introduce, refusal
from shoal.control.reception import doorkeeper, receive
from shoal.errors import ControlError, ShoalError, UsageError

Note = Callable[[str], None]
# Asked when a machine has come: the names that it cannot have.
Names = Callable[[], Collection[str]]
# A machine that has never trained before fetches the text over a slow network first.
_PROVIDE_S = 3600.0
_LOOK_S = 1.0


class Doorstep:
    """`late`: whoever comes is told that the run goes on already."""

    def __init__(self, address: str, port: int, cargo: Cargo, note: Note, late: bool = False) -> None:
        self._address = address
        self._port = port
        self._cargo = cargo
        self._note = note
        self._late = late
        self._door = doorkeeper(note)

    async def receive_one(self, taken: Names, look: Callable[[], None]) -> Guest:
        """Once it has everything, and has checked it. `look` is called every second meanwhile."""
        code = make_code()
        arrived: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = await receive(reader, writer, code, self._door)
            if channel is None:
                return
            peer = writer.get_extra_info("peername")[0]
            try:
                guest = await asyncio.wait_for(self._admit(channel, code, taken), _PROVIDE_S)
            except (ShoalError, OSError, EOFError) as error:
                self._note(
                    f"refused {peer}: {error.seen if isinstance(error, ShoalError) else error or 'it went away'}"
                )
                channel.close()
                return
            if arrived.done():
                writer.close()
            else:
                arrived.set_result(guest)

        server = await self._listen(welcome)
        try:
            invitation = Invitation(self._address, server.sockets[0].getsockname()[1], code)
            self._note(f"on the machine to join, type: shoal join {invitation}")
            while not arrived.done():
                await asyncio.wait([arrived], timeout=_LOOK_S)
                look()
                self._door.look()
            return arrived.result()
        finally:
            # Not `async with`: that would wait until the guest's own connection is closed.
            server.close()
            self._door.sum_up()

    async def _listen(self, welcome: object) -> asyncio.Server:
        try:
            return await asyncio.start_server(welcome, self._address, self._port)  # type: ignore[arg-type]
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._address}:{self._port}: {error.strerror}",
                fix="name another port, or none: a free one is found",
            ) from error

    async def _admit(self, channel: Channel, code: str, taken: Names) -> Guest:
        facts = await channel.receive()
        hello = Hello.from_dict(facts.get("hello"))
        cores, address = facts.get("cores"), str(facts.get("address"))
        if type(cores) is not int or not 0 < cores < 1 << 16 or not _is_address(address):
            raise ControlError(f"a machine that joins says that it has {cores!r:.40} cores at {address!r:.60}")
        if error := refusal(_us(), hello):
            await channel.send({"type": "refused", **error.as_dict()})
            raise error
        name = free_name(safe_name(str(facts.get("name"))), taken())
        guest = Guest(name, address, cores, channel, code, asyncio.get_running_loop())
        texts = self._cargo.texts({digest: digest for digest in self._cargo.files})
        await guest.provide(texts, self._cargo.files, self._late)
        return guest


def free_name(wanted: str, taken: Collection[str]) -> str:
    names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-")[:64] or "machine"


def _us() -> Hello:
    """Versions and kind of machine; the run's own digests are compared when the agents meet."""
    return introduce(0, safe_name(socket.gethostname()), "", "", "")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

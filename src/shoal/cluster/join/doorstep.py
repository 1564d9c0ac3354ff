"""Where machines that come by themselves are received: one after another, each with a code that works once."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection

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
# Asked with a question for the owner of the run: whether the machine may join.
Confirm = Callable[[str], Awaitable[bool]]
# A machine that has never trained before fetches the text over a slow network first.
_PROVIDE_S = 3600.0
_LOOK_S = 1.0
_MOST_USER_NAME = 32


class Doorstep:
    """`late`: a joining machine is told that the run goes on already. With `confirm` the owner of the run is asked
    before a machine that knows the code gets the text, the configuration or the token."""

    def __init__(
        self,
        address: str,
        port: int,
        cargo: Cargo,
        note: Note,
        late: bool = False,
        confirm: Confirm | None = None,
    ) -> None:
        self._address = address
        self._port = port
        self._cargo = cargo
        self._note = note
        self._late = late
        self._confirm = confirm
        self._asking = asyncio.Lock()
        self._door = doorkeeper(note)
        self._code = ""

    async def receive_one(self, taken: Names, look: Callable[[], None]) -> Guest:
        """Once it has everything, and has checked it. `look` is called every second meanwhile."""
        arrived: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            code = self._code
            channel = await receive(reader, writer, code, self._door)
            if channel is None:
                return
            peer = writer.get_extra_info("peername")[0]
            try:
                guest = await asyncio.wait_for(self._admit(channel, code, peer, taken), _PROVIDE_S)
            except (ShoalError, OSError, EOFError) as error:
                self._note(
                    f"refused {peer}: {error.seen if isinstance(error, ShoalError) else error or 'it went away'}"
                )
                channel.close()
                if isinstance(error, _Unwanted) and code == self._code and not arrived.done():
                    self._invite(port)
                return
            if arrived.done() or code != self._code:
                writer.close()
            else:
                arrived.set_result(guest)

        server = await self._listen(welcome)
        try:
            port = server.sockets[0].getsockname()[1]
            self._invite(port)
            while not arrived.done():
                await asyncio.wait([arrived], timeout=_LOOK_S)
                look()
                self._door.look()
            return arrived.result()
        finally:
            # Not `async with`: that would wait until the guest's own connection is closed.
            server.close()
            self._door.sum_up()

    def _invite(self, port: int) -> None:
        """Make a new code; an earlier one counts no more. It is shown on a line of its own, so that it is not typed as
        an argument: other users of the joining machine could read it in the list of processes."""
        self._code = make_code()
        invitation = Invitation(self._address, port, self._code)
        self._note(f"on the machine to join, type: shoal join {invitation.place}")
        self._note(f"it asks for this code, which works once: {invitation.shown_code}")

    async def _listen(self, welcome: object) -> asyncio.Server:
        try:
            return await asyncio.start_server(welcome, self._address, self._port)  # type: ignore[arg-type]
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._address}:{self._port}: {error.strerror}",
                fix="name another port, or none: a free one is found",
            ) from error

    async def _admit(self, channel: Channel, code: str, peer: str, taken: Names) -> Guest:
        facts = await channel.receive()
        hello = Hello.from_dict(facts.get("hello"))
        cores, address = facts.get("cores"), str(facts.get("address"))
        if type(cores) is not int or not 0 < cores < 1 << 16 or not _is_address(address):
            raise ControlError(f"a machine that joins says that it has {cores!r:.40} cores at {address!r:.60}")
        if error := refusal(_us(), hello):
            await channel.send({"type": "refused", **error.as_dict()})
            raise error
        name = free_name(safe_name(str(facts.get("name"))[:256]), taken())
        user = printable(facts.get("user"))
        guest = Guest(name, address, peer, user, cores, channel, code, asyncio.get_running_loop())
        await self._ask_owner(guest)
        texts = self._cargo.texts({digest: digest for digest in self._cargo.files})
        await guest.provide(texts, self._cargo.files, self._late)
        return guest

    async def _ask_owner(self, guest: Guest) -> None:
        """One question at a time: two machines may come with the same code."""
        if self._confirm is None:
            return
        async with self._asking:
            if guest.code == self._code and await self._confirm(f"may {guest} take part in this run?"):
                return
        error = _Unwanted(
            f"the owner of the run did not let {guest.name} in",
            why="shoal host runs there with --confirm, and the answer was no",
            fix="ask the owner for a new code",
        )
        await guest.channel.send({"type": "refused", **error.as_dict()})
        raise error


class _Unwanted(ControlError):
    """The owner of the run said no: the code is in the wrong hands, and a new one is made."""


def printable(name: object) -> str:
    """A name that another machine claims, as it can be shown: without control characters, and not long."""
    shown = "".join(letter for letter in name if letter.isprintable()) if isinstance(name, str) else ""
    return repr(shown[:_MOST_USER_NAME]) if shown.strip() else "not named"


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Compared without case: names become file names, and some disks do not tell `DESK` from `desk`."""
    folded = {name.casefold() for name in taken}
    names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(folded) + 2))
    return next(name for name in names if name.casefold() not in folded)


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

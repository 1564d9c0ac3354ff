"""This machine and others that join it, each by one line that its owner types."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from shoal.cluster.cargo import Cargo
from shoal.cluster.join.guest import Guest
from shoal.cluster.join.invitation import Invitation, make_code
from shoal.cluster.join.spec import JoinSpec
from shoal.cluster.link import Link, PipeLink, agent_command
from shoal.cluster.node import Node
from shoal.control.channel import Channel
from shoal.control.hello import Hello, introduce, refusal
from shoal.control.machine import physical_cores
from shoal.control.reception import doorkeeper, receive
from shoal.control.route import interface_for, source_address
from shoal.errors import ControlError, ShoalError, UsageError

Note = Callable[[str], None]
# A machine that has never trained before fetches the text over a slow network first.
_PROVIDE_S = 3600.0
_LOOK_S = 1.0


class JoinCluster:
    """Open once all have come; `nodes` begins with this machine."""

    def __init__(self, spec: JoinSpec, cargo: Cargo, note: Note) -> None:
        self._spec = spec
        self._cargo = cargo
        self._note = note
        self._address = spec.address or own_address()
        self._guests: dict[str, Guest] = {}
        self._door = doorkeeper(note)
        self._loop = asyncio.new_event_loop()
        interface = interface_for(self._address, None, socket.gethostname())
        here = Node(safe_name(socket.gethostname()), self._address, interface, 1, physical_cores())
        self.nodes = [here]

    @classmethod
    @contextmanager
    def open(cls, spec: JoinSpec, cargo: Cargo, note: Note) -> Iterator[JoinCluster]:
        cluster = cls(spec, cargo, note)
        thread = threading.Thread(target=cluster._loop.run_forever, name="reception", daemon=True)
        thread.start()
        try:
            # In turns, so that Ctrl-C is heard while nobody comes.
            waiting = asyncio.run_coroutine_threadsafe(cluster._receive_all(), cluster._loop)
            while not waiting.done():
                threading.Event().wait(0.1)
            waiting.result()
            yield cluster
        finally:
            cluster._loop.call_soon_threadsafe(cluster._loop.stop)
            thread.join(timeout=5)

    def start_agent(self, node: Node, run: Path) -> Link:
        if node is self.nodes[0]:
            return PipeLink(agent_command(run, node.name), run, node.name)
        guest = self._guests[node.name]
        guest.listen(run)
        return guest

    def folder(self, node: Node, run: Path) -> str:
        return str(run)

    async def _receive_all(self) -> None:
        """One after another, each with a code of its own."""
        while len(self.nodes) < self._spec.machines:
            guest = await self._receive_one()
            self._guests[guest.name] = guest
            self.nodes.append(Node(guest.name, guest.address, None, 1, guest.cores))
            self._note(
                f"{guest.name} ({guest.address}) has joined: {len(self.nodes)} of {self._spec.machines} machines"
            )

    async def _receive_one(self) -> Guest:
        code = make_code()
        arrived: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = await receive(reader, writer, code, self._door)
            if channel is None:
                return
            peer = writer.get_extra_info("peername")[0]
            try:
                guest = await asyncio.wait_for(self._admit(channel, code), _PROVIDE_S)
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
                self._miss_those_who_left()
                self._door.look()
            return arrived.result()
        finally:
            # Not `async with`: that would wait until the guest's own connection is closed.
            server.close()
            self._door.sum_up()

    def _miss_those_who_left(self) -> None:
        for name, guest in list(self._guests.items()):
            if guest.channel.is_closed():
                del self._guests[name]
                self.nodes = [node for node in self.nodes if node.name != name]
                self._note(f"{name} has left: {len(self.nodes)} of {self._spec.machines} machines")

    async def _listen(self, welcome: object) -> asyncio.Server:
        try:
            return await asyncio.start_server(welcome, self._address, self._spec.port)  # type: ignore[arg-type]
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._address}:{self._spec.port}: {error.strerror}",
                fix="name another port, or none: a free one is found",
            ) from error

    async def _admit(self, channel: Channel, code: str) -> Guest:
        facts = await channel.receive()
        hello = Hello.from_dict(facts.get("hello"))
        cores, address = facts.get("cores"), str(facts.get("address"))
        if type(cores) is not int or not 0 < cores < 1 << 16 or not _is_address(address):
            raise ControlError(f"a machine that joins says that it has {cores!r:.40} cores at {address!r:.60}")
        if error := refusal(_us(), hello):
            await channel.send({"type": "refused", **error.as_dict()})
            raise error
        name = self._free_name(safe_name(str(facts.get("name"))))
        guest = Guest(name, address, cores, channel, code, self._loop)
        await guest.provide(self._cargo.texts({digest: digest for digest in self._cargo.files}), self._cargo.files)
        return guest

    def _free_name(self, wanted: str) -> str:
        taken = {node.name for node in self.nodes}
        names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


def _us() -> Hello:
    """Versions and kind of machine; the run's own digests are compared when the agents meet."""
    return introduce(0, safe_name(socket.gethostname()), "", "", "")


def safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-")[:64] or "machine"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_address() -> str:
    """On the way out of the house; without one, of the first interface that leads anywhere."""
    try:
        found = source_address("192.0.2.1")
    except OSError:
        found = "127.0.0.1"
    if not found.startswith("127."):
        return found
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    others = [
        entry.address for entry in entries if entry.family is socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not others:
        raise UsageError(
            "this machine has no network address that another one could reach",
            why="only the loopback interface is up",
            fix="connect it to a network, then try again",
        )
    return others[0]

"""This machine and others that join it, each by one line that its owner types."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from shoal.cluster.agent_link import (
    PIECE_BYTES,
    AgentLink,
    FileReceiver,
    PipeLink,
    RefusedFiles,
    agent_command,
    read_piece,
)
from shoal.cluster.node import Node, RunFiles, ranks_of
from shoal.cluster.target import JoinSpec
from shoal.control.channel import Channel, Message, seal
from shoal.control.connection_guard import connection_guard, receive
from shoal.control.handshake import Hello, introduce, refusal
from shoal.errors import ControlError, ShoalError, UsageError, from_dict
from shoal.host.facts import interface_for, physical_cores, source_address

# SECTION cluster/join/guest
# One machine that joined: what it needs goes to it, what it writes comes here, and nothing makes it run anything.
#
# It plans and starts its own ranks. Of our orders it is told only who takes part, which is what it cannot know.


@dataclass
class JoinedLink:
    """A `AgentLink` to a machine that came by itself. `code` is the one it came with, and is of no use to anybody
    else."""

    name: str
    address: str
    # The address that its connection comes from, which it cannot choose, and the user name that it claims.
    peer: str
    user: str
    cores: int
    channel: Channel
    code: str
    loop: asyncio.AbstractEventLoop
    _ended: str | None = None
    _reachable: bool = True
    _listening: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        """For the host's owner. The user is what the other machine claims."""
        elsewhere = "" if self.peer == self.address else f", connected from {self.peer}"
        return f"{self.name} ({self.address}{elsewhere}; it says its user is {self.user})"

    async def provide(self, texts: Mapping[str, str], files: Mapping[str, Path], late: bool = False) -> None:
        """Until the machine has everything, and has checked it. `late`: the run goes on already."""
        sizes = {name: path.stat().st_size for name, path in files.items()}
        welcome = {"type": "welcome", "node": self.name, "texts": dict(texts), "files": sizes, "late": late}
        await self.channel.send(welcome)
        answer = await self.channel.receive()
        wanted = answer.get("need")
        for name in [name for name in files if isinstance(wanted, list) and name in wanted]:
            await self._send_file(name, files[name])
        if answer.get("type") == "need":
            answer = await self.channel.receive()
        if answer.get("type") != "prepared":
            raise from_dict(answer) if "seen" in answer else ControlError(f"{self.name} went away while it prepared")

    async def _send_file(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                await self.channel.send({"type": "piece", "path": name, "data": base64.b64encode(piece).decode()})

    def listen(self, run: Path, ranks: Collection[int], note: Callable[[str], None]) -> None:
        """Keep what it sends of its own journal, logs and `ranks`. Anything else is refused, noted and left out."""
        home = FileReceiver(run, self.name, ranks)
        home.start({})
        self._listening = asyncio.run_coroutine_threadsafe(self._take_home(home, RefusedFiles(note)), self.loop)

    async def _take_home(self, home: FileReceiver, refusals: RefusedFiles) -> None:
        spoke = False
        try:
            while (message := await self.channel.receive()).get("type") != "end":
                try:
                    path, offset, piece = read_piece(message, self.name)
                    home.keep(path, offset, piece)
                    spoke = True
                except ControlError as error:
                    refusals.add(str(message.get("path"))[:100], error)
            self._ended = "its agent ended"
        except Exception as error:
            # Gone, or talking nonsense. Its agent may well go on, and the others hear its heart, once it has begun.
            self._reachable = False
            if not spoke:
                self._ended = f"it left before the run began ({type(error).__name__})"

    def send(self, line: bytes) -> None:
        """Of an order, who it is and whom it meets. Wishes reach its agent through the other agents."""
        order = json.loads(line)
        if "Meet" in order:
            meet = order["Meet"]
            told = {name: meet[name] for name in ("node", "member", "launch", "launched_at")}
            self._tell({"type": "meet", **told, "sealed": seal(meet["token"], self.code)})
        elif "Go" in order:
            resume = any("--resume" in start["argv"] for start in order["Go"]["starts"])
            told = {name: order["Go"][name] for name in ("roster", "members")}
            self._tell({"type": "roster", "resume": resume, **told})

    def _tell(self, message: Message) -> None:
        asyncio.run_coroutine_threadsafe(self.channel.send(message), self.loop)

    def ended(self) -> str | None:
        return self._ended

    def is_reachable(self) -> bool:
        return self._reachable

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.channel.close)


# SECTION cluster/join/invitation
# What is typed on the machine to join: where to go, and a code that works once.


# None is taken for another one. 16 hold 79 bits: whoever records the greeting does not guess them later either.
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_LENGTH = 16
_INVITATION = re.compile(r"\[?(?P<address>[^#\]]+?)\]?:(?P<port>\d{1,5})(?:#(?P<code>[A-Za-z0-9-]+))?")
_CODE = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Invitation:
    """`code` is empty where it was not typed with the address, and is then asked for."""

    address: str
    port: int
    code: str = ""

    @property
    def place(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def shown_code(self) -> str:
        return "-".join(self.code[at : at + 4] for at in range(0, len(self.code), 4))

    def __str__(self) -> str:
        return f"{self.place}#{self.shown_code}" if self.code else self.place

    def with_code(self, code: str) -> Invitation:
        return replace(self, code=parse_code(code))


def make_code() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))


def parse_invitation(text: str) -> Invitation:
    """`ADDRESS:PORT`, or `ADDRESS:PORT#CODE`."""
    match = _INVITATION.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(
            f"{_without_code(text)!r} is no invitation",
            why="it is an address and a port, as 192.168.1.5:41234; or the folder of a run to come back to",
            fix="copy what shoal host printed after `shoal join`",
        )
    return Invitation(match["address"], int(match["port"]), parse_code(match["code"]) if match["code"] else "")


def parse_code(text: str) -> str:
    """Without the dashes, in small letters. The message does not repeat what was typed: it may be nearly right."""
    code = "".join(text.split()).replace("-", "").lower()
    if not _CODE.fullmatch(code):
        raise _no_code("", "a code has letters and digits, as abcd-efgh-jkmn-pqrs")
    if len(code) != _LENGTH:
        seen = (
            f"{len(code)} of {_LENGTH} letters" if len(code) < _LENGTH else f"{len(code)} letters instead of {_LENGTH}"
        )
        raise _no_code(f": {seen}", "a part of it is missing, or something else was copied with it")
    return code


def _no_code(seen: str, why: str) -> UsageError:
    return UsageError(
        f"that is no code of an invitation{seen}",
        why=why,
        fix="copy the code that shoal host printed, on a line of its own",
    )


def _without_code(text: str) -> str:
    place, hash_sign, _ = text.partition("#")
    return f"{place}#…" if hash_sign else place


# SECTION cluster/join/doorstep
# Where machines that come by themselves are received: one after another, each with a code that works once.


Note = Callable[[str], None]
# Asked when a machine has come: the names that it cannot have.
Names = Callable[[], Collection[str]]
# Asked with a question for the owner of the run: whether the machine may join.
Confirm = Callable[[str], Awaitable[bool]]
# A machine that has never trained before fetches the text over a slow network first.
_PROVIDE_S = 3600.0
_LOOK_S = 1.0
_MOST_USER_NAME = 32


class JoinServer:
    """`late`: a joining machine is told that the run goes on already. With `confirm` the owner of the run is asked
    before a machine that knows the code gets the text, the configuration or the token."""

    def __init__(
        self,
        address: str,
        port: int,
        cargo: RunFiles,
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
        self._door = connection_guard(note)
        self._code = ""

    async def receive_one(self, taken: Names, look: Callable[[], None]) -> JoinedLink:
        """Once it has everything, and has checked it. `look` is called every second meanwhile."""
        arrived: asyncio.Future[JoinedLink] = asyncio.get_running_loop().create_future()

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
                if isinstance(error, _JoinRefused) and code == self._code and not arrived.done():
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

    async def _admit(self, channel: Channel, code: str, peer: str, taken: Names) -> JoinedLink:
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
        guest = JoinedLink(name, address, peer, user, cores, channel, code, asyncio.get_running_loop())
        await self._ask_owner(guest)
        texts = self._cargo.texts({digest: digest for digest in self._cargo.files})
        await guest.provide(texts, self._cargo.files, self._late)
        return guest

    async def _ask_owner(self, guest: JoinedLink) -> None:
        """One question at a time: two machines may come with the same code."""
        if self._confirm is None:
            return
        async with self._asking:
            if guest.code == self._code and await self._confirm(f"may {guest} take part in this run?"):
                return
        error = _JoinRefused(
            f"the owner of the run did not let {guest.name} in",
            why="shoal host runs there with --confirm, and the answer was no",
            fix="ask the owner for a new code",
        )
        await guest.channel.send({"type": "refused", **error.as_dict()})
        raise error


class _JoinRefused(ControlError):
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


class JoinCluster:
    """Open once all have come; `nodes` begins with this machine."""

    def __init__(self, spec: JoinSpec, cargo: RunFiles, note: Note, confirm: Confirm | None = None) -> None:
        self._spec = spec
        self._confirm = confirm
        self._cargo = cargo
        self._note = note
        self._address = spec.address or own_address()
        self._guests: dict[str, JoinedLink] = {}
        self._loop = asyncio.new_event_loop()
        interface = interface_for(self._address, None, socket.gethostname())
        here = Node(safe_name(socket.gethostname()), self._address, interface, 1, physical_cores())
        self.nodes = [here]

    @classmethod
    @contextmanager
    def open(cls, spec: JoinSpec, cargo: RunFiles, note: Note, confirm: Confirm | None = None) -> Iterator[JoinCluster]:
        cluster = cls(spec, cargo, note, confirm)
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

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        if node is self.nodes[0]:
            return PipeLink(agent_command(run, node.name), run, node.name)
        guest = self._guests[node.name]
        guest.listen(run, ranks_of(self.nodes, node), self._note)
        return guest

    def folder(self, node: Node, run: Path) -> str:
        return str(run)

    async def _receive_all(self) -> None:
        """One after another, each with a code of its own."""
        doorstep = JoinServer(self._address, self._spec.port, self._cargo, self._note, confirm=self._confirm)
        while len(self.nodes) < self._spec.machines:
            guest = await doorstep.receive_one(self._names, self._miss_those_who_left)
            self._guests[guest.name] = guest
            self.nodes.append(Node(guest.name, guest.address, None, 1, guest.cores))
            self._note(f"{guest} has joined: {len(self.nodes)} of {self._spec.machines} machines")

    def _names(self) -> set[str]:
        return {node.name for node in self.nodes}

    def _miss_those_who_left(self) -> None:
        for name, guest in list(self._guests.items()):
            if guest.channel.is_closed():
                del self._guests[name]
                self.nodes = [node for node in self.nodes if node.name != name]
                self._note(f"{name} has left: {len(self.nodes)} of {self._spec.machines} machines")


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

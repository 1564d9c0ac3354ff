"""Machines that join by themselves: `--on join:N` and `shoal host`.

The owner of each machine types `shoal join ADDRESS:PORT` there and a code that works once. The machine then receives
what the run needs, plans and starts its own ranks, and sends back what they write. It can make this machine run
nothing, and this machine sends it no commands: of the orders it receives only who takes part.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import shlex
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
from shoal.cluster.node import Node, Note, RunFiles, own_node, ranks_of
from shoal.cluster.target import JoinSpec
from shoal.cluster.transfer import PIECE_BYTES, FileReceiver, RefusedFiles, piece_message, read_piece
from shoal.control.channel import Channel, Message, seal
from shoal.control.connection_guard import accept_connection, make_connection_guard
from shoal.control.handshake import Hello, find_mismatch, make_hello
from shoal.control.invitation import Invitation, make_code
from shoal.control.orders import GoOrder, MeetOrder
from shoal.control.rank_env import RESUME
from shoal.errors import ControlError, ShoalError, UsageError, from_dict
from shoal.host.facts import interface_for, source_address
from shoal.host.network import interface_addresses

# Returns the names that a joining machine cannot have.
TakenNames = Callable[[], Collection[str]]
# Asks the owner of the run whether a machine may join.
Confirm = Callable[[str], Awaitable[bool]]

# A machine that has never trained before first fetches the data, perhaps over a slow network.
_PROVIDE_TIMEOUT_S = 3600.0
_POLL_S = 1.0
_MOST_USER_NAME = 32


class JoinCluster:
    """This machine, which is the first of `nodes`, and the machines that joined it."""

    def __init__(self, spec: JoinSpec, run_files: RunFiles, note: Note, confirm: Confirm | None = None) -> None:
        self._spec = spec
        self._confirm = confirm
        self._run_files = run_files
        self._note = note
        self._address = spec.address or own_address()
        self._joined: dict[str, JoinedLink] = {}
        self._loop = asyncio.new_event_loop()
        interface = interface_for(self._address, None, socket.gethostname())
        here = own_node(safe_name(socket.gethostname()), self._address, interface)
        self.nodes = [here]

    @classmethod
    @contextmanager
    def open(
        cls, spec: JoinSpec, run_files: RunFiles, note: Note, confirm: Confirm | None = None
    ) -> Iterator[JoinCluster]:
        """Wait until all machines have joined."""
        cluster = cls(spec, run_files, note, confirm)
        thread = threading.Thread(target=cluster._loop.run_forever, name="join server", daemon=True)
        thread.start()
        try:
            # Short waits let Ctrl-C interrupt this thread.
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
        link = self._joined[node.name]
        link.listen(run, ranks_of(self.nodes, node), self._note)
        return link

    def folder(self, node: Node, run: Path) -> str:
        return str(run)

    async def _receive_all(self) -> None:
        """Receive machines one after another, each with a code of its own."""
        server = JoinServer(self._address, self._spec.port, self._run_files, self._note, confirm=self._confirm)
        while len(self.nodes) < self._spec.machines:
            link = await server.receive_one(lambda: {node.name for node in self.nodes}, self._remove_closed)
            self._joined[link.name] = link
            self.nodes.append(Node(link.name, link.address, None, 1, None))
            self._note(f"{link} has joined: {len(self.nodes)} of {self._spec.machines} machines")

    def _remove_closed(self) -> None:
        for name, link in list(self._joined.items()):
            if link.channel.is_closed():
                del self._joined[name]
                self.nodes = [node for node in self.nodes if node.name != name]
                self._note(f"{name} has left: {len(self.nodes)} of {self._spec.machines} machines")


def own_address() -> str:
    """Return this machine's address on the default route; without one, that of its first interface but loopback."""
    try:
        address = source_address("192.0.2.1")
    except OSError:
        address = "127.0.0.1"
    candidates = [address, *(own for owned in interface_addresses().values() for own in owned if ":" not in own)]
    reachable = [address for address in candidates if not address.startswith("127.")]
    if not reachable:
        raise UsageError(
            "this machine has no network address that another one could reach",
            why="only the loopback interface is up",
            fix="connect it to a network, then try again",
        )
    return reachable[0]


@dataclass
class JoinedLink:
    """An `AgentLink` to a machine that joined."""

    name: str
    address: str
    peer: str  # where its connection comes from: it cannot choose this address
    user: str  # the user name that it claims
    channel: Channel
    code: str  # the one it joined with, which no other machine can use
    loop: asyncio.AbstractEventLoop
    sends_files = True
    _ended: str | None = None
    _reachable: bool = True
    _listening: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        elsewhere = "" if self.peer == self.address else f", connected from {self.peer}"
        return f"{self.name} ({self.address}{elsewhere}; it says its user is {self.user})"

    async def provide(self, texts: Mapping[str, str], files: Mapping[str, Path], late: bool = False) -> None:
        """Send the machine what it lacks, until it has checked everything. `late`: the run has begun already."""
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
                await self.channel.send(piece_message(name, file.tell() - len(piece), piece))

    def listen(self, run: Path, ranks: Collection[int], note: Note) -> None:
        """Write what it sends of its own journal, logs and `ranks`. Everything else is refused and reported."""
        files = FileReceiver(run, self.name, ranks)
        files.start({})
        self._listening = asyncio.run_coroutine_threadsafe(self._receive(files, RefusedFiles(note)), self.loop)

    async def _receive(self, files: FileReceiver, refused: RefusedFiles) -> None:
        has_sent = False
        try:
            while (message := await self.channel.receive()).get("type") != "end":
                try:
                    path, offset, piece = read_piece(message, self.name)
                    files.write(path, offset, piece)
                    has_sent = True
                except ControlError as error:
                    refused.add(str(message.get("path"))[:100], error)
            self._ended = "its agent ended"
        except Exception as error:
            # The connection is lost or invalid. Once its agent has begun, the other agents receive its heartbeats.
            self._reachable = False
            if not has_sent:
                self._ended = f"it left before the run began ({type(error).__name__})"

    def send(self, line: bytes) -> None:
        """Send who the machine is and which nodes take part, of an order. Stop requests reach its agent through the
        other agents."""
        order = json.loads(line)
        if meet := order.get(MeetOrder.__name__):
            fields = {name: meet[name] for name in ("node", "member", "launch", "launched_at", "config", "data")}
            self._post({"type": "meet", **fields, "sealed": seal(meet["token"], self.code)})
        elif go := order.get(GoOrder.__name__):
            starts = go["starts"]
            resume = any("--resume" in start["argv"] or RESUME in start["env"] for start in starts)
            ports = [int(start["env"].get("MASTER_PORT", 0)) for start in starts]
            fields = {name: go[name] for name in ("roster", "members", "grace_s")}
            self._post({"type": "roster", "resume": resume, "script_port": max(ports, default=0), **fields})

    def _post(self, message: Message) -> None:
        asyncio.run_coroutine_threadsafe(self.channel.send(message), self.loop)

    def ended(self) -> str | None:
        return self._ended

    def is_reachable(self) -> bool:
        return self._reachable

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.channel.close)


def install_command() -> str:
    """Return what a machine types to have the versions of this one, without which it is refused."""
    own = make_hello(0, "", "", "", "")
    # The build, such as +cpu, is not part of what a package index offers.
    return f"python{own.python} -m pip install shoal=={own.shoal} torch=={own.torch.partition('+')[0]}"


class JoinServer:
    """Receives joining machines one after another, each with a code that works once.

    With `late`, a machine learns that the run has begun already. With `confirm`, the owner of the run is asked before a
    machine that knows the code gets the data, the configuration or the token.
    """

    def __init__(
        self,
        address: str,
        port: int,
        run_files: RunFiles,
        note: Note,
        late: bool = False,
        confirm: Confirm | None = None,
    ) -> None:
        self._words = run_files.join_words
        self._address = address
        self._port = port
        self._run_files = run_files
        self._note = note
        self._late = late
        self._confirm = confirm
        self._confirming = asyncio.Lock()
        self._guard = make_connection_guard(note)
        self._code = ""
        self._has_explained = False

    async def receive_one(self, taken: TakenNames, look: Callable[[], None]) -> JoinedLink:
        """Return the next machine once it has checked everything it needs. `look` is called every second meanwhile."""
        arrived: asyncio.Future[JoinedLink] = asyncio.get_running_loop().create_future()

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            code = self._code
            channel = await accept_connection(reader, writer, code, self._guard, unknown="it has another code")
            if channel is None:
                return
            peer = writer.get_extra_info("peername")[0]
            try:
                link = await asyncio.wait_for(self._admit(channel, code, peer, taken), _PROVIDE_TIMEOUT_S)
            except (ShoalError, OSError, EOFError) as error:
                ended = "it took too long" if isinstance(error, TimeoutError) else "it closed the connection"
                self._note(f"refused {peer}: {error.seen if isinstance(error, ShoalError) else str(error) or ended}")
                channel.close()
                if isinstance(error, _JoinRefused) and code == self._code and not arrived.done():
                    self._invite(port)
                return
            if arrived.done() or code != self._code:
                writer.close()
            else:
                arrived.set_result(link)

        try:
            server = await asyncio.start_server(welcome, self._address, self._port)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._address}:{self._port}: {error.strerror}",
                fix="name another port, or none: a free one is found",
            ) from error
        try:
            port = server.sockets[0].getsockname()[1]
            self._invite(port)
            while not arrived.done():
                await asyncio.wait([arrived], timeout=_POLL_S)
                look()
                self._guard.look()
            return arrived.result()
        finally:
            # Not `async with`: that would wait until the connection of the joined machine is closed.
            server.close()
            self._guard.sum_up()

    def _invite(self, port: int) -> None:
        """Make and show a new code, which replaces an earlier one. It has a line of its own, so that it is not typed as
        an argument, which other users of the joining machine could read in the list of processes."""
        self._code = make_code()
        invitation = Invitation(self._address, port, self._code)
        if not self._has_explained:
            self._has_explained = True
            self._note(f"a machine without shoal needs it first: {install_command()}")
        self._note(f"on the machine to join, type: {shlex.join(['shoal', 'join', invitation.place, *self._words])}")
        self._note(f"it asks for this code, which works once: {invitation.shown_code}")

    async def _admit(self, channel: Channel, code: str, peer: str, taken: TakenNames) -> JoinedLink:
        facts = await channel.receive()
        hello = Hello.from_dict(facts.get("hello"))
        address = str(facts.get("address"))
        if not _is_address(address):
            raise ControlError(f"a machine that joins says that its address is {address!r:.60}")
        # Versions and kind of machine; the agents compare the run's own digests when they connect.
        own_hello = make_hello(0, safe_name(socket.gethostname()), "", "", "")
        if error := find_mismatch(own_hello, hello):
            await channel.send({"type": "refused", **error.as_dict()})
            raise error
        name = free_name(safe_name(str(facts.get("name"))[:256]), taken())
        user = printable(facts.get("user"))
        link = JoinedLink(name, address, peer, user, channel, code, asyncio.get_running_loop())
        await self._ask_owner(link)
        texts = self._run_files.texts({digest: digest for digest in self._run_files.files})
        await link.provide(texts, self._run_files.files, self._late)
        return link

    async def _ask_owner(self, link: JoinedLink) -> None:
        """Ask one question at a time: two machines may come with the same code."""
        if self._confirm is None:
            return
        async with self._confirming:
            if link.code == self._code and await self._confirm(f"may {link} take part in this run?"):
                return
        error = _JoinRefused(
            f"the owner of the run did not let {link.name} in",
            why="shoal host runs there with --confirm, and the answer was no",
            fix="ask the owner for a new code",
        )
        await link.channel.send({"type": "refused", **error.as_dict()})
        raise error


class _JoinRefused(ControlError):
    """The owner of the run refused the machine: the code has leaked, and a new one is made."""


def printable(name: object) -> str:
    """Return a name that another machine claims such that it can be shown: short, without control characters."""
    shown = "".join(letter for letter in name if letter.isprintable()) if isinstance(name, str) else ""
    return repr(shown[:_MOST_USER_NAME]) if shown.strip() else "not named"


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return a name that is not taken. Case does not count: names become file names, and some disks ignore case."""
    folded = {name.casefold() for name in taken}
    names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(folded) + 2))
    return next(name for name in names if name.casefold() not in folded)


def safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-")[:64] or "machine"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

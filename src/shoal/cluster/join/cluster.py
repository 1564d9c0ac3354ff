"""This machine and others that join it, each by one line that its owner types."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from shoal.cluster.cargo import Cargo
from shoal.cluster.join.doorstep import Confirm, Doorstep, Note, safe_name
from shoal.cluster.join.guest import Guest
from shoal.cluster.join.spec import JoinSpec
from shoal.cluster.link import Link, PipeLink, agent_command
from shoal.cluster.node import Node, ranks_of
from shoal.control.machine import physical_cores
from shoal.control.route import interface_for, source_address
from shoal.errors import UsageError


class JoinCluster:
    """Open once all have come; `nodes` begins with this machine."""

    def __init__(self, spec: JoinSpec, cargo: Cargo, note: Note, confirm: Confirm | None = None) -> None:
        self._spec = spec
        self._confirm = confirm
        self._cargo = cargo
        self._note = note
        self._address = spec.address or own_address()
        self._guests: dict[str, Guest] = {}
        self._loop = asyncio.new_event_loop()
        interface = interface_for(self._address, None, socket.gethostname())
        here = Node(safe_name(socket.gethostname()), self._address, interface, 1, physical_cores())
        self.nodes = [here]

    @classmethod
    @contextmanager
    def open(cls, spec: JoinSpec, cargo: Cargo, note: Note, confirm: Confirm | None = None) -> Iterator[JoinCluster]:
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

    def start_agent(self, node: Node, run: Path) -> Link:
        if node is self.nodes[0]:
            return PipeLink(agent_command(run, node.name), run, node.name)
        guest = self._guests[node.name]
        guest.listen(run, ranks_of(self.nodes, node), self._note)
        return guest

    def folder(self, node: Node, run: Path) -> str:
        return str(run)

    async def _receive_all(self) -> None:
        """One after another, each with a code of its own."""
        doorstep = Doorstep(self._address, self._spec.port, self._cargo, self._note, confirm=self._confirm)
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

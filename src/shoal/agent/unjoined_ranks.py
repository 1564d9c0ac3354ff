"""Find the ranks of a script that never joined a process group, from their TCP sockets.

With torch's own store, every rank keeps a connection to MASTER_PORT open for as long as its process group lives; where
rank 0 serves it, it listens there. A rank with neither trains alone, or meets the others elsewhere (a file, MPI, an
address in the script), which sockets do not show: so this is a warning, never an error. Nor do they show a rank that
joins the group and then trains without it.

`JoinWatch` looks repeatedly and remembers, because a group that was destroyed after the training leaves no socket. A
rank that is refused, because rank 0 does not listen, has none either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from shoal.control.membership.settings import UNJOINED_AFTER_S, UNJOINED_CHECK_S
from shoal.control.orders import StartProcess
from shoal.host.proc import TcpSocket, plain_address, tcp_sockets_of


def is_at(sockets: Iterable[TcpSocket], address: str, port: int) -> bool:
    """Return whether a rank with these sockets serves the store, or has or requests a connection to it."""
    place = (plain_address(address), port)
    return any((sock.is_listening and sock.port == port) or (sock.peer, sock.peer_port) == place for sock in sockets)


def who_is_alone(met: Mapping[int, bool | None], world_size: int) -> list[int]:
    """Return the ranks that were never connected to the store; `None` is a rank that could not be inspected."""
    if world_size == 1:
        return []
    return sorted(rank for rank, seen in met.items() if seen is False)


@dataclass
class JoinWatch:
    """Remembers which ranks were ever connected to the store."""

    address: str
    port: int
    met: dict[int, bool | None] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> None:
        """Inspect the ranks that run now, and forget ended ones: they may have joined and left between two looks."""
        self.met = {rank: self.met.get(rank) or self._has_joined(pid) for rank, pid in pids.items()}

    def _has_joined(self, pid: int) -> bool | None:
        sockets = observe(pid)
        return None if sockets is None else is_at(sockets, self.address, self.port)


class UnjoinedRanks:
    """Reports once, a minute after the start, which of a node's script ranks have joined a group and which have not."""

    def __init__(
        self,
        starts: Iterable[StartProcess],
        report: Callable[[list[int], list[int], float], None],
        note_first: Callable[[], None],
    ) -> None:
        """`note_first` is called when the first of these ranks is seen at the store."""
        script_ranks = [start for start in starts if start.is_script_rank]
        self._ranks = {start.name: start.ranks[0] for start in script_ranks}
        self._report = report
        self._note_first = note_first
        self._has_noted_first = False
        self._watch: JoinWatch | None = None
        self._looked_s = 0.0
        if script_ranks and (world_size := int(script_ranks[0].env["WORLD_SIZE"])) > 1:
            self._world_size = world_size
            self._watch = JoinWatch(script_ranks[0].env["MASTER_ADDR"], int(script_ranks[0].env["MASTER_PORT"]))

    def look(self, pids: Mapping[str, int], elapsed_s: float) -> None:
        """Inspect the ranks, `elapsed_s` after the start; rarely, because it costs some milliseconds per rank."""
        if self._watch is None or elapsed_s - self._looked_s < UNJOINED_CHECK_S:
            return
        self._looked_s = elapsed_s
        self._watch.look({self._ranks[name]: pid for name, pid in pids.items() if name in self._ranks})
        if any(self._watch.met.values()) and not self._has_noted_first:
            self._has_noted_first = True
            self._note_first()
        if elapsed_s > UNJOINED_AFTER_S:
            met = sorted(rank for rank, has_joined in self._watch.met.items() if has_joined)
            self._report(met, who_is_alone(self._watch.met, self._world_size), elapsed_s)
            self._watch = None


def observe(pid: int) -> list[TcpSocket] | None:
    """Return the TCP sockets of a process and its descendants; None when it is gone or belongs to another user."""
    try:
        sockets = tcp_sockets_of(pid)
    except OSError:
        return None
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(OSError):
            sockets += tcp_sockets_of(child.pid)
    return sockets

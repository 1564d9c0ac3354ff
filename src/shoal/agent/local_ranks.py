"""The ranks of this node in an elastic run: their connections, which generation each is in, and when it restarts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.control.channel import read_frame
from shoal.control.membership.settings import RESTART_BACKOFF_S, RESTART_FORGIVEN_S
from shoal.control.membership.types import Ballot, Ranks, State
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import (
    MAX_BYTES,
    EnterGeneration,
    LeaveGeneration,
    ToAgent,
    ToRank,
    read_to_agent,
    to_frame,
)
from shoal.errors import ControlError

# A rank that reads nothing is frozen or about to be killed: lease renewals for it must not pile up.
_MAX_UNREAD_BYTES = 64 << 10


class RankConnection:
    """The agent's end of the socket on which it and one rank exchange `rank_messages`."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[ToAgent], None], refuse: Callable[[str], None]
    ) -> None:
        self._socket = sock
        self._on_message = on_message
        self._refuse = refuse
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None

    async def listen(self) -> None:
        """Deliver messages until the rank closes its end; call `refuse` for one that cannot be read."""
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._writer = writer
        for frame in self._unsent:
            writer.write(frame)
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._on_message(read_to_agent(await read_frame(reader, MAX_BYTES, "a rank's message")))
        except ControlError as error:
            self._refuse(error.seen)
        finally:
            writer.close()

    def send(self, message: ToRank) -> None:
        frame = to_frame(message)
        if self._writer is None:
            self._unsent.append(frame)
        elif not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MAX_UNREAD_BYTES:
            self._writer.write(frame)


@dataclass
class LocalRank:
    start: StartProcess
    connection: RankConnection | None = None  # None: the process has ended
    is_ready: bool = False  # it has imported everything
    has_state: bool = False
    generation: Ballot | None = None  # the one it was last told to enter
    has_formed: bool = False  # it is in that generation's group
    has_left: bool = False  # it has left that generation
    state: State | None = None  # when it left
    has_finished: bool = False
    attempts: int = 0  # to restart it
    restarted_at: float = 0.0
    restart_at: float | None = None

    @property
    def is_alive(self) -> bool:
        return self.connection is not None

    def send(self, message: ToRank) -> None:
        if self.connection is not None:
            self.connection.send(message)

    def begin(self, connection: RankConnection) -> None:
        self.connection, self.restart_at = connection, None
        self.is_ready = self.has_state = self.has_formed = self.has_left = self.has_finished = False
        self.generation = self.state = None

    def end(self) -> None:
        self.connection = None
        self.is_ready = self.has_state = False

    def enter(self, order: EnterGeneration) -> None:
        self.generation, self.has_formed, self.has_left, self.state = order.generation, False, False, None
        self.send(order)

    def record_left(self, state: State | None) -> None:
        self.has_left, self.state, self.has_state = True, state, state is not None


@dataclass
class LocalRanks:
    ranks: Sequence[LocalRank]
    restarts: int  # how often each may be restarted in short order
    committed_at_start: int = 0  # the last step of this node in the ledger, as its ranks read it when they started
    _by_name: dict[str, LocalRank] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {rank.start.name: rank for rank in self.ranks}

    def named(self, name: str) -> LocalRank:
        return self._by_name[name]

    def ready(self) -> Ranks:
        """Return the local numbers of the ranks that train or wait to join."""
        return tuple(
            local for local, rank in enumerate(self.ranks) if rank.is_alive and (rank.is_ready or rank.generation)
        )

    def members_of(self, generation: Ballot) -> list[LocalRank]:
        return [rank for rank in self.ranks if rank.is_alive and rank.generation == generation]

    def still_in(self, generation: Ballot) -> list[LocalRank]:
        """Return the ranks that were told to enter and have not left."""
        return [rank for rank in self.members_of(generation) if not rank.has_left]

    def stop(self, generation: Ballot, after_step: bool) -> None:
        for rank in self.still_in(generation):
            rank.send(LeaveGeneration(generation=generation, after_step=after_step))
            if not rank.is_ready:
                # It still imports, or prepares its data: it has not entered, and reads all orders when it is ready.
                rank.record_left(None)

    def all_formed(self, generation: Ballot) -> bool:
        return _all_of_some(rank.has_formed for rank in self.members_of(generation))

    def all_ready(self) -> bool:
        """Whether every started rank is ready: ranks that start together join together."""
        return _all_of_some(rank.is_ready or rank.generation is not None for rank in self.ranks if rank.is_alive)

    def all_finished(self) -> bool:
        """Whether a rank has finished, and every live rank that trained has passed the last barrier."""
        return any(rank.has_finished for rank in self.ranks) and not any(
            rank.is_alive and rank.generation and not rank.has_finished for rank in self.ranks
        )

    def have_ended(self) -> bool:
        """Whether no rank is alive and none will be restarted."""
        return not any(rank.is_alive or rank.restart_at is not None for rank in self.ranks)

    def waiting(self) -> list[LocalRank]:
        """Return the live ranks that have not joined a generation yet."""
        return [rank for rank in self.ranks if rank.is_alive and rank.generation is None]

    def furthest_state(self, generation: Ballot) -> State | None:
        states = [rank.state for rank in self.members_of(generation) if rank.state is not None]
        return max(states, key=lambda state: (state.step, state.committed), default=None)

    def schedule_restart(self, rank: LocalRank, now: float) -> float | None:
        """Return after how many seconds the rank restarts; None after too many attempts in short order."""
        if now - rank.restarted_at >= RESTART_FORGIVEN_S:
            rank.attempts = 0
        if rank.attempts >= self.restarts:
            return None
        after_s = RESTART_BACKOFF_S[min(rank.attempts, len(RESTART_BACKOFF_S) - 1)]
        rank.attempts += 1
        rank.restarted_at = now
        rank.restart_at = now + after_s
        return after_s

    def cancel_restarts(self) -> None:
        for rank in self.ranks:
            rank.restart_at = None

    def due_restarts(self, now: float) -> list[LocalRank]:
        return [rank for rank in self.ranks if rank.restart_at is not None and now >= rank.restart_at]


def _all_of_some(answers: Iterable[bool]) -> bool:
    """Return whether all are true and there is at least one."""
    values = list(answers)
    return bool(values) and all(values)

"""This node's ranks, as its council sees them: who is here, in which generation, and where it stands. Pure but for the
lines by which they are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.control.membership.types import Ballot, Ranks, State
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import (
    LENGTH,
    MOST_BYTES,
    EnterGeneration,
    LeaveGeneration,
    ToAgent,
    ToRank,
    read_to_agent,
    to_frame,
)
from shoal.errors import ControlError

# SECTION launch/lines
# The agent's end of one rank's line: what `control.rankline` says, over a socket that the rank inherits.


# A rank that reads nothing is frozen or about to be ended: leases for it need not pile up.
_MOST_UNREAD = 64 << 10


class RankConnection:
    def __init__(self, ours: socket.socket, hear: Callable[[ToAgent], None], refuse: Callable[[str], None]) -> None:
        self._socket = ours
        self._hear = hear
        self._refuse = refuse
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None

    async def listen(self) -> None:
        """Until the rank closes its end. One that says what we don't understand is refused."""
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._writer = writer
        for frame in self._unsent:
            writer.write(frame)
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._hear(read_to_agent(await _read_frame(reader)))
        except ControlError as error:
            self._refuse(error.seen)
        finally:
            writer.close()

    def say(self, message: ToRank) -> None:
        frame = to_frame(message)
        if self._writer is None:
            self._unsent.append(frame)
        elif not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MOST_UNREAD:
            self._writer.write(frame)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if size > MOST_BYTES:
        raise ControlError(f"a rank's message of {size} bytes", why="the stream is broken")
    return await reader.readexactly(size)


# How long to wait before a killed rank is started again; the last one for every further time.
BACK_OFF_S = (0.2, 1.0, 3.0)
# A rank that lived so long since then was not killed for its own sake: a training of weeks may lose one every day.
FORGIVEN_S = 600.0


@dataclass
class LocalRank:
    """One rank. `here`: it has imported everything. `holds`: it has a state of its own. `inside`: the generation it was
    last told to enter; `out`: it has answered a halt of that one. `again_at`: when it is started again."""

    start: StartProcess
    line: RankConnection | None = None
    here: bool = False
    holds: bool = False
    inside: Ballot | None = None
    formed: bool = False
    out: bool = False
    state: State | None = None
    finished: bool = False
    attempts: int = 0
    tried_at: float = 0.0
    again_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.line is not None

    def say(self, message: ToRank) -> None:
        if self.line is not None:
            self.line.say(message)

    def begin(self, line: RankConnection) -> None:
        self.line, self.again_at = line, None
        self.here = self.holds = self.formed = self.out = self.finished = False
        self.inside = self.state = None

    def end(self) -> None:
        self.line = None
        self.here = self.holds = False

    def enter(self, order: EnterGeneration) -> None:
        self.inside, self.formed, self.out, self.state = order.generation, False, False, None
        self.say(order)

    def halted(self, state: State | None) -> None:
        self.out, self.state, self.holds = True, state, state is not None


@dataclass
class LocalRanks:
    hands: Sequence[LocalRank]
    restarts: int
    _by_name: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {hand.start.name: local for local, hand in enumerate(self.hands)}

    def named(self, name: str) -> LocalRank:
        return self.hands[self._by_name[name]]

    def ready(self) -> Ranks:
        """The local numbers of those that train or wait."""
        return tuple(local for local, hand in enumerate(self.hands) if hand.alive and (hand.here or hand.inside))

    def inside(self, generation: Ballot) -> list[LocalRank]:
        return [hand for hand in self.hands if hand.alive and hand.inside == generation]

    def still_in(self, generation: Ballot) -> list[LocalRank]:
        """Those that were told to enter and have not come out."""
        return [hand for hand in self.inside(generation) if not hand.out]

    def halt(self, generation: Ballot, at_edge: bool) -> None:
        for hand in self.still_in(generation):
            hand.say(LeaveGeneration(generation=generation, at_edge=at_edge))

    def all_formed(self, generation: Ballot) -> bool:
        return _all(hand.formed for hand in self.inside(generation))

    def all_finished(self) -> bool:
        """Whoever is left of those that trained has passed the last barrier."""
        return any(hand.finished for hand in self.hands) and not any(
            hand.alive and hand.inside and not hand.finished for hand in self.hands
        )

    def waiting(self) -> list[LocalRank]:
        """Started again, and not let in yet."""
        return [hand for hand in self.hands if hand.alive and hand.inside is None]

    def furthest(self, generation: Ballot) -> State | None:
        states = [hand.state for hand in self.inside(generation) if hand.state is not None]
        return max(states, key=lambda state: (state.step, state.committed), default=None)

    def all_here(self) -> bool:
        """Everybody who was started has said so: several that come together are let in together."""
        return _all(hand.here or hand.inside is not None for hand in self.hands if hand.alive)

    def try_again(self, hand: LocalRank, now: float) -> float | None:
        """After how many seconds it is started again; None when that was tried often enough, in short order."""
        if now - hand.tried_at >= FORGIVEN_S:
            hand.attempts = 0
        if hand.attempts >= self.restarts:
            return None
        after_s = BACK_OFF_S[min(hand.attempts, len(BACK_OFF_S) - 1)]
        hand.attempts += 1
        hand.tried_at = now
        hand.again_at = now + after_s
        return after_s

    def rest(self) -> None:
        """Nobody is started again."""
        for hand in self.hands:
            hand.again_at = None

    def due(self, now: float) -> list[LocalRank]:
        return [hand for hand in self.hands if hand.again_at is not None and now >= hand.again_at]

    def is_gone(self) -> bool:
        """Nobody is left, and nobody will be started again."""
        return not any(hand.alive or hand.again_at is not None for hand in self.hands)


def _all(answers: Iterable[bool]) -> bool:
    found = list(answers)
    return bool(found) and all(found)

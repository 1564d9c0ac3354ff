"""A rank as a member of generations: told by its agent which to enter and when one is over."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress

from shoal.control.membership.types import Ballot
from shoal.control.rank_messages import (
    LENGTH,
    MOST_BYTES,
    AbandonCommits,
    EnterGeneration,
    GenerationBroken,
    GroupFormed,
    LeaseRenewed,
    LeaveGeneration,
    LeftGeneration,
    RankReady,
    StepCommitted,
    ToAgent,
    ToRank,
    TrainingFinished,
    read_to_rank,
    to_frame,
)
from shoal.errors import ControlError, Interrupted, RunFailed
from shoal.sync.fence import GenerationFence
from shoal.sync.interruptible import Connections, GroupInterrupt

# SECTION sync/membership/line
# A rank's connection to its agent about membership: framed messages, the socket inherited.


class AgentConnection:
    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()

    def send(self, message: ToAgent) -> None:
        """OSError when the agent is gone; the kernel ends us with it."""
        with self._sending:
            self._socket.sendall(to_frame(message))

    def receive(self) -> ToRank | None:
        """None when the agent has closed its end."""
        head = self._read(LENGTH)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if size > MOST_BYTES:
            raise ControlError(f"a message of {size} bytes from the agent", why="the stream is broken")
        payload = self._read(size)
        return None if payload is None else read_to_rank(payload)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


_MOST_WORDS = 400
_AGAIN_S = 0.05
# A stop can wait for the next generation, which is a matter of a moment; unless there is none to come.
_PAUSED_AFTER_S = 4.0


class MembershipClient:
    """`fence` is what the training asks. A thread of its own listens to the agent, so that a rank that is stuck in an
    exchange, or computes for seconds, still frees itself and answers at once."""

    def __init__(
        self,
        line: AgentConnection,
        wants_stop: Callable[[], bool] = lambda: False,
        note_fault: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.fence = GenerationFence()
        self.release = GroupInterrupt()
        self._wants_stop = wants_stop
        self._note_fault = note_fault
        self._line = line
        self._connections = Connections()
        self._changed = threading.Condition()
        self._is_waiting = False
        self._next: EnterGeneration | None = None
        self._given_up: list[AbandonCommits] = []
        self._halted = queue.SimpleQueue[Ballot]()
        # Both now: a rank that has run out of memory can start none, and has to leave its generation all the same.
        threading.Thread(target=self._keep_shut, name="halted", daemon=True).start()
        threading.Thread(target=self._listen, name="agent's words", daemon=True).start()

    # The training's side.

    def here(self, committed: int) -> None:
        self._say(RankReady(committed=committed))

    def await_enter(self) -> EnterGeneration:
        """As long as it takes: a minority waits here with its state until others are back, and ends with its agent, or
        when somebody asks it to."""
        began = time.monotonic()
        with self._changed:
            self._is_waiting = True
            while not self._changed.wait_for(lambda: self._next is not None, _PAUSED_AFTER_S / 4):
                if self._wants_stop() and time.monotonic() - began > _PAUSED_AFTER_S:
                    raise Interrupted("asked to stop while the run was paused", why="its last checkpoint is untouched")
            enter, self._next = self._next, None
            assert enter is not None  # noqa: S101 - what was waited for
            self.fence.enter(enter.generation, enter.holds, enter.state.committed)
            self.release.begin()
            self._is_waiting = False
        return enter

    def is_called(self) -> bool:
        """Whether there is no point in waiting for this generation any more."""
        return self.fence.is_over or self._next is not None

    def formed(self, generation: Ballot, copied_s: float) -> None:
        self._say(GroupFormed(generation=generation, copied_s=copied_s))

    def committed(self, step: int) -> None:
        self.fence.committed(step)
        self._say(StepCommitted(step=step))

    def broken(self, generation: Ballot, why: str) -> None:
        self._say(GenerationBroken(generation=generation, why=why[:_MOST_WORDS]))

    def halted(self, generation: Ballot) -> None:
        """Of our own accord, at the end of a step."""
        self._say(LeftGeneration(generation=generation, state=self.fence.end(generation)))
        self._let_go()

    def finished(self) -> None:
        self._say(TrainingFinished())

    def given_up(self) -> list[AbandonCommits]:
        with self._changed:
            return list(self._given_up)

    def forget_given_up(self, written: Collection[AbandonCommits]) -> None:
        """They are in every ledger that has something of them; not before, since this generation may break, too."""
        with self._changed:
            self._given_up = [each for each in self._given_up if each not in written]

    # The agent's side.

    def _listen(self) -> None:
        try:
            while (message := self._line.receive()) is not None:
                self._take(message)
        except Exception as error:
            # Without memory even the words may fail; a rank that hears nothing any more must end all the same.
            with suppress(Exception):
                self._note_fault(error)
            with suppress(Exception):
                traceback.print_exc()
            os._exit(RunFailed.exit_code)
        # Without its agent a rank can commit nothing; the kernel ends it with the agent where it can.
        os._exit(Interrupted.exit_code)

    def _take(self, message: ToRank) -> None:
        match message:
            case LeaseRenewed():
                self.fence.lease(message.generation, message.at_s)
            case LeaveGeneration(at_edge=True):
                self.fence.ask_for_edge(message.generation)
            case LeaveGeneration():
                self._halt(message.generation)
            case EnterGeneration():
                with self._changed:
                    self._next = message
                    self._changed.notify_all()
            case AbandonCommits():
                with self._changed:
                    self._given_up.append(message)

    def _halt(self, generation: Ballot) -> None:
        with self._changed:
            if self._next is not None and self._next.generation == generation:
                # It was over before we had come to it.
                self._next = None
        state = self.fence.end(generation)
        self._let_go()
        self._say(LeftGeneration(generation=generation, state=state))
        self._halted.put(generation)

    def _keep_shut(self) -> None:
        """Until the training has noticed. It may have been in the middle of connecting: what it opens after a first
        look would lead to peers that have left as well, and it would wait there for as long as an exchange may take."""
        while True:
            generation = self._halted.get()
            while self._is_stuck_in(generation):
                time.sleep(_AGAIN_S)

    def _is_stuck_in(self, generation: Ballot) -> bool:
        # Held meanwhile, so that it cannot go on to the next generation, whose connections are to stay.
        with self._changed:
            if self._is_waiting or self.fence.generation != generation:
                return False
            # Without memory or file numbers it may fail; there is another look, and there are later generations.
            with suppress(Exception):
                self._let_go()
            return True

    def _let_go(self) -> None:
        self._connections.shut()
        self.release.end()

    def _say(self, message: ToAgent) -> None:
        with suppress(OSError):
            self._line.send(message)

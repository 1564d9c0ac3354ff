"""The rank's side of membership: the agent tells it which generation to enter and when one is over."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from shoal.control.channel import receive_frame
from shoal.control.membership.types import MAX_FORKS, Ballot, read_ballot
from shoal.control.rank_messages import (
    MAX_BYTES,
    AbandonCommits,
    EnterGeneration,
    GenerationBroken,
    GroupFormed,
    LeaseRenewed,
    LeaveGeneration,
    LeftGeneration,
    MachineTooSlow,
    RankReady,
    RankWaits,
    StepCommitted,
    ToAgent,
    ToRank,
    TrainingFinished,
    read_to_rank,
    to_frame,
)
from shoal.errors import Interrupted, RunFailed
from shoal.sync.fence import GenerationFence
from shoal.sync.interruptible import Connections, GroupInterrupt

_MAX_REASON_CHARS = 400
_SHUT_AGAIN_S = 0.05
# A requested stop waits this long for the next generation, which usually comes within moments; then the run is paused.
_PAUSED_AFTER_S = 4.0


class AgentConnection:
    """A rank's inherited socket to its agent, with framed membership messages."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._send_lock = threading.Lock()

    def send(self, message: ToAgent) -> None:
        """Send a message. Raise OSError when the agent is gone; the kernel then ends this process, too."""
        with self._send_lock:
            self._socket.sendall(to_frame(message))

    def receive(self) -> ToRank | None:
        """Return the next message; None when the agent has closed its end."""
        payload = receive_frame(self._socket, MAX_BYTES, "a message from the agent")
        return None if payload is None else read_to_rank(payload)


class MembershipClient:
    """Tracks this rank's generation. The training asks `fence`.

    A thread listens to the agent, so that a rank that is stuck in a collective, or computes for seconds, still leaves a
    generation and answers at once.
    """

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
        self._agent = line
        self._connections = Connections()
        self._changed = threading.Condition()
        # The training waits for its next generation.
        self._is_waiting = False
        self._next: EnterGeneration | None = None
        self._abandoned: list[AbandonCommits] = []
        self._left = queue.SimpleQueue[Ballot]()
        # Started now: a rank that has run out of memory can start no thread, and must still leave its generation.
        threading.Thread(target=self._keep_connections_shut, name="left generations", daemon=True).start()
        threading.Thread(target=self._listen, name="agent messages", daemon=True).start()

    # Called by the training thread.

    def send_ready(self, committed: int, max_ranks: int | None = None) -> None:
        self._send(RankReady(committed=committed, max_ranks=max_ranks))

    def await_enter(self) -> EnterGeneration:
        """Wait for the next generation, without a timeout, and enter it.

        A minority waits here with its state until other nodes are back. It ends with its agent, or on a requested stop.
        """
        began = time.monotonic()
        self._send(RankWaits(generation=self.fence.generation))
        with self._changed:
            self._is_waiting = True
            while not self._changed.wait_for(lambda: self._next is not None, _PAUSED_AFTER_S / 4):
                if self._wants_stop() and time.monotonic() - began > _PAUSED_AFTER_S:
                    raise Interrupted("asked to stop while the run was paused", why="its last checkpoint is untouched")
            enter, self._next = self._next, None
            assert enter is not None  # noqa: S101 - what was waited for
            self.fence.enter(enter.generation, enter.has_state, enter.state.committed)
            self.release.begin()
            self._is_waiting = False
        return enter

    def await_end(self, timeout_s: float) -> bool:
        """Wait until the agent has ended this generation; return False if it has not."""
        with self._changed:
            return self._changed.wait_for(self.is_superseded, timeout_s)

    def is_superseded(self) -> bool:
        """Return whether waiting for this generation is pointless: it is over, or a newer one is announced."""
        return self.fence.is_over or self._next is not None

    def send_formed(
        self, generation: Ballot, copied_s: float, history: Sequence[tuple[str, int]] = (), can_lose_parts: bool = False
    ) -> None:
        left = tuple((read_ballot(lineage), step) for lineage, step in history[-MAX_FORKS:])
        formed = GroupFormed(generation=generation, copied_s=copied_s, history=left, can_lose_parts=can_lose_parts)
        self._send(formed)

    def committed(self, step: int) -> None:
        self.fence.committed(step)
        self._send(StepCommitted(step=step))

    def send_broken(self, generation: Ballot, why: str, timed_out: bool) -> None:
        self._send(GenerationBroken(generation=generation, why=why[:_MAX_REASON_CHARS], timed_out=timed_out))

    def send_too_slow(self) -> None:
        self._send(MachineTooSlow(generation=self.fence.generation))

    def leave_after_step(self, generation: Ballot) -> None:
        """Leave the generation at the end of a step, without an order to leave at once."""
        self._send(LeftGeneration(generation=generation, state=self.fence.end(generation)))
        self._drop_connections()

    def send_finished(self) -> None:
        self._send(TrainingFinished())

    def abandoned_commits(self) -> list[AbandonCommits]:
        """Return the abandoned commits that are not yet written into every ledger."""
        with self._changed:
            return list(self._abandoned)

    def forget_abandoned_commits(self, written: Collection[AbandonCommits]) -> None:
        """Forget abandoned commits once every ledger has them; not earlier, because this generation may break, too."""
        with self._changed:
            self._abandoned = [abandoned for abandoned in self._abandoned if abandoned not in written]

    # Called by the thread that listens to the agent.

    def _listen(self) -> None:
        try:
            while (message := self._agent.receive()) is not None:
                self._handle(message)
        except Exception as error:
            # Without memory even writing the error may fail; a rank without its listener must end all the same.
            with suppress(Exception):
                self._note_fault(error)
            with suppress(Exception):
                traceback.print_exc()
            os._exit(RunFailed.exit_code)
        # Without its agent a rank can commit nothing; where the kernel can, it ends the rank with the agent.
        os._exit(Interrupted.exit_code)

    def _handle(self, message: ToRank) -> None:
        match message:
            case LeaseRenewed():
                self.fence.lease(message.generation, message.at_s)
            case LeaveGeneration(after_step=True):
                self.fence.request_stop_after_step(message.generation)
            case LeaveGeneration():
                self._leave(message.generation)
            case EnterGeneration():
                with self._changed:
                    self._next = message
                    self._changed.notify_all()
            case AbandonCommits():
                with self._changed:
                    self._abandoned.append(message)

    def _leave(self, generation: Ballot) -> None:
        with self._changed:
            if self._next is not None and self._next.generation == generation:
                # It was over before this rank entered it.
                self._next = None
        state = self.fence.end(generation)
        with self._changed:
            self._changed.notify_all()
        self._drop_connections()
        self._send(LeftGeneration(generation=generation, state=state))
        self._left.put(generation)

    def _keep_connections_shut(self) -> None:
        """Shut connections repeatedly until the training has noticed that its generation is over.

        It may have been in the middle of connecting. Connections that it opens later lead to peers that have left as
        well, and it would wait there for a whole collective timeout.
        """
        while True:
            generation = self._left.get()
            while self._is_stuck_in(generation):
                time.sleep(_SHUT_AGAIN_S)

    def _is_stuck_in(self, generation: Ballot) -> bool:
        # The lock keeps the training from entering the next generation, whose connections must stay.
        with self._changed:
            if self._is_waiting or self.fence.generation != generation:
                return False
            # It may fail without memory or free file descriptors; it is repeated, also for later generations.
            with suppress(Exception):
                self._drop_connections()
            return True

    def _drop_connections(self) -> None:
        self._connections.shut()
        self.release.end()

    def _send(self, message: ToAgent) -> None:
        with suppress(OSError):
            self._agent.send(message)

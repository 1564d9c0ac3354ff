"""The agent's end of the template (`train/template.py`), from which ranks are forked instead of being started.

A rank that is forked needs no import of torch, and shares its memory. A template that has ended, or cannot fork safely,
never ends a run: ranks are then started as programs of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.cluster.node import start_process
from shoal.control.fork_request import (
    LOAD_VARIABLES,
    ForkRequest,
    Reply,
    receive_reply,
    send_request,
    template_command,
)
from shoal.control.membership.settings import TEMPLATE_REPLY_S
from shoal.control.processes import adopt_orphans
from shoal.host.facts import boot_clock

# Starts the same rank as a program of its own, with these descriptors in these variables.
StartPlain = Callable[[Mapping[str, int]], subprocess.Popen[bytes]]


class RankTemplate:
    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes] | None, log: Path, note: Callable[[str], None]
    ) -> None:
        self._socket = sock
        self._process = process  # None: of a lab, and no child of this process
        self._log = log
        self._note = note
        self._ready_at: float | None = None
        self._has_refused = False
        self._requests = 0
        self._unsent: deque[ForkedRank] = deque()
        self._waiting: dict[int, ForkedRank] = {}  # by the numbers of their requests, oldest first
        self._forked: dict[int, ForkedRank] = {}
        sock.setblocking(False)

    @classmethod
    def start(cls, env: Mapping[str, str], folder: str, log: Path, note: Callable[[str], None]) -> RankTemplate:
        """Start a template with the variables that all ranks of this node share; OSError if it cannot be started."""
        # Ranks are forked by a child of the template that ends at once: their parent is then this process.
        adopt_orphans()
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            command = template_command(sys.executable, folder, its_end.fileno())
            process = start_process(command, {**env, **LOAD_VARIABLES}, log, (its_end.fileno(),))
        return cls(own_end, process, log, note)

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def can_be_asked(self) -> bool:
        return self.is_open and not self._has_refused

    def fork(
        self, argv: tuple[str, ...], env: Mapping[str, str], log: Path, fds: Mapping[str, int], plain: StartPlain
    ) -> ForkedRank:
        """Ask for a rank; it exists once it has a `pid`."""
        self._requests += 1
        request = ForkRequest(os.getpid(), argv, {**os.environ, **env}, tuple(fds), self._requests)
        rank = ForkedRank(self, request, log, fds, plain)
        self._unsent.append(rank)
        self._send_requests()
        return rank

    def _send_requests(self) -> None:
        """Send what the socket takes: while the template imports torch, it holds the requests of about 25 ranks."""
        while self.is_open and self._unsent:
            rank = self._unsent[0]
            try:
                rank.send_request(self._socket)
            except BlockingIOError:
                return
            except ConnectionError as error:
                self._give_up(f"it cannot be asked: {error.strerror}")
            except OSError as error:
                self._refuse(rank, f"it cannot be asked: {error.strerror}")
            else:
                self._waiting[rank.request.number] = rank
            self._unsent.popleft()

    def read_replies(self) -> None:
        """Give the ranks that were forked since the last call their numbers, and those that ended their exit codes."""
        self._send_requests()
        try:
            while self.is_open:
                reply = receive_reply(self._socket)
                if reply is None:
                    self._give_up("it has ended")
                else:
                    self._apply(reply)
        except BlockingIOError:
            # Not while it imports: on a slow machine that takes minutes, with a template or without.
            if self._waiting and self._ready_at is not None:
                asked_at = max(self._ready_at, next(iter(self._waiting.values())).asked_at)
                if boot_clock() - asked_at > TEMPLATE_REPLY_S:
                    self._give_up(f"it has not answered for {TEMPLATE_REPLY_S:.0f} s")
        except (OSError, ValueError, TypeError, LookupError) as error:
            self._give_up(f"its reply cannot be read: {error}")

    def _apply(self, reply: Reply) -> None:
        if reply.refused and not reply.number:
            self._give_up(reply.refused)
        elif reply.refused:
            # A rank that was killed just after it sent its number is no longer waiting.
            if (refused := self._waiting.pop(reply.number, None)) is not None:
                self._refuse(refused, reply.refused)
        elif reply.code is not None:
            if (ended := self._forked.pop(reply.pid, None)) is not None:
                ended.end(reply.code)
        elif reply.pid:
            rank = self._forked[reply.pid] = self._waiting.pop(reply.number)
            rank.begin(reply.pid)
        else:
            self._ready_at = boot_clock()

    def _refuse(self, rank: ForkedRank, why: str) -> None:
        """Have one rank started without the template, which stays open: on an emulated node its ranks end with it."""
        rank.is_refused = True
        if not self._has_refused:
            self._note_plain_start(why)
        self._has_refused = True

    def _give_up(self, why: str) -> None:
        self._note_plain_start(why)
        self.end()

    def _note_plain_start(self, why: str) -> None:
        self._note(f"ranks are started one by one, without a template: {why} ({self._log})")

    def cancel(self, rank: ForkedRank) -> None:
        """Make sure that a cancelled rank does not run. A template that is ready answers soon; the rank ends then."""
        if rank in self._unsent:
            self._unsent.remove(rank)
            rank.is_refused = True
        elif self._ready_at is None:
            self.end()

    def end(self) -> None:
        """End the template. The ranks that it has forked continue, except on an emulated node: they end with it."""
        if self.is_open:
            # From here on no rank can send its number, and ends therefore: those that run are known once all is read.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                while (reply := receive_reply(self._socket)) is not None:
                    self._apply(reply)
            self._socket.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class ForkedRank:
    """A rank that the template forks. It becomes a child of this process, or on an emulated node of the template."""

    def __init__(
        self, template: RankTemplate, request: ForkRequest, log: Path, fds: Mapping[str, int], plain: StartPlain
    ) -> None:
        self.pid = 0  # 0: it is not forked yet
        self.asked_at = boot_clock()
        self.request = request
        self._template = template
        self._log = log
        self._plain = plain
        # Kept until it has its own: the template may end before it forks this rank.
        self._fds = {name: os.dup(fd) for name, fd in fds.items()}
        self._early_signals: list[int] = []
        self.is_refused = False
        self._is_cancelled = False
        self._process: subprocess.Popen[bytes] | None = None  # started as a program, because the template has ended
        self._code: int | None = None

    def send_request(self, to: socket.socket) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            send_request(to, self.request, (output.fileno(), *self._fds.values()))
        self.asked_at = boot_clock()

    def begin(self, pid: int) -> None:
        self.pid = pid
        self._close_fds()
        if self._is_cancelled:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for signum in self._early_signals:
            self.send_signal(signum)

    def _close_fds(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def poll(self) -> int | None:
        """Return the exit code as `subprocess.Popen.poll` does; None while the rank runs, or waits to be forked."""
        if not self.pid:
            self._template.read_replies()
        if not self.pid and (self.is_refused or not self._template.is_open) and self._code is None:
            if self._is_cancelled:
                self._close_fds()
                self._code = -signal.SIGKILL
            else:
                self._process = self._plain(self._fds)
                self.begin(self._process.pid)
        if self._process is not None:
            return self._process.poll()
        if self._code is None and self.pid:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._template.read_replies()
                if not self._template.is_open and self._code is None:
                    # It ended with its template, which reports nothing any more.
                    self._code = -signal.SIGKILL
            else:
                self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def end(self, code: int) -> None:
        self._code = code

    def send_signal(self, signum: int) -> None:
        """Signal the rank, or have it signalled once it is forked."""
        if not self.pid:
            self._early_signals.append(signum)
        elif self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def cancel(self) -> None:
        """Kill a rank that is not forked yet, or keep it from being so."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._template.cancel(self)

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
    differing_variables,
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
    def __init__(self, env: Mapping[str, str], folder: str, log: Path, note: Callable[[str], None]) -> None:
        """Start the template. `env` are the variables that all ranks of this node share; OSError if it cannot start."""
        self._env = {**os.environ, **env, **LOAD_VARIABLES}
        self._log = log
        self._note = note
        self._ready_at: float | None = None
        self._waiting: deque[ForkedRank] = deque()  # in the order of their requests
        # Ranks are forked by a child of the template that ends at once: their parent is then this process.
        adopt_orphans()
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with its_end:
            command = template_command(sys.executable, folder, its_end.fileno())
            self._process = start_process(command, self._env, log, (its_end.fileno(),))

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def suits(self, env: Mapping[str, str]) -> bool:
        """Return whether a rank with these variables would have read the same when it loaded its libraries."""
        return not differing_variables(self._env, {**os.environ, **env})

    def fork(
        self, argv: tuple[str, ...], env: Mapping[str, str], log: Path, fds: Mapping[str, int], plain: StartPlain
    ) -> ForkedRank | None:
        """Ask for a rank; it exists once it has a `pid`. None when the template cannot be asked."""
        request = ForkRequest(os.getpid(), argv, {**os.environ, **env}, tuple(fds))
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                send_request(self._socket, request, output.fileno(), tuple(fds.values()))
        except OSError as error:
            self._give_up(f"it cannot be asked: {error.strerror}")
            return None
        rank = ForkedRank(self, fds, plain)
        self._waiting.append(rank)
        return rank

    def read_replies(self) -> None:
        """Give the ranks that were forked since the last call their numbers."""
        try:
            while self.is_open:
                reply = receive_reply(self._socket)
                if reply is None:
                    self._give_up("it has ended")
                elif reply.refused:
                    self._give_up(reply.refused)
                elif reply.pid and self._waiting:
                    self._waiting.popleft().begin(reply.pid)
                else:
                    self._ready_at = boot_clock()
        except BlockingIOError:
            # Not while it imports: on a slow machine that takes minutes, with a template or without.
            if self._waiting and self._ready_at is not None:
                asked_at = max(self._ready_at, self._waiting[0].asked_at)
                if boot_clock() - asked_at > TEMPLATE_REPLY_S:
                    self._give_up(f"it has not answered for {TEMPLATE_REPLY_S:.0f} s")
        except ConnectionError:
            # It ended before it read all requests.
            self._give_up("it has ended")
        except (OSError, ValueError, TypeError) as error:
            self._give_up(f"its reply cannot be read: {error}")

    def _give_up(self, why: str) -> None:
        self._note(f"ranks are started one by one, without a template: {why} ({self._log})")
        self.end()

    def end(self) -> None:
        """Kill the template; ranks that it has forked continue."""
        if self.is_open:
            self._socket.close()
            self._process.kill()
            self._process.wait()


class ForkedRank:
    """A rank that the template forks. It is a child of this process, like one that was started."""

    def __init__(self, template: RankTemplate, fds: Mapping[str, int], plain: StartPlain) -> None:
        self.pid = 0  # 0: it is not forked yet
        self.asked_at = boot_clock()
        self._template = template
        self._plain = plain
        # Kept until it has its own: the template may end before it forks this rank.
        self._fds = {name: os.dup(fd) for name, fd in fds.items()}
        self._early_signals: list[int] = []
        self._is_cancelled = False
        self._process: subprocess.Popen[bytes] | None = None  # started as a program, because the template has ended
        self._code: int | None = None

    def begin(self, pid: int) -> None:
        self.pid = pid
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        for signum in self._early_signals:
            self.send_signal(signum)

    def poll(self) -> int | None:
        """Return the exit code as `subprocess.Popen.poll` does; None while the rank runs, or waits to be forked."""
        if not self.pid:
            self._template.read_replies()
        if not self.pid and not self._template.is_open and self._code is None:
            if self._is_cancelled:
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
                ended, status = self.pid, signal.SIGKILL
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, signum: int) -> None:
        """Signal the rank, or have it signalled once it is forked."""
        if not self.pid:
            self._early_signals.append(signum)
        elif self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def cancel(self) -> None:
        """Make sure that a rank which is not forked yet never will be."""
        self._is_cancelled = True
        self._template.end()

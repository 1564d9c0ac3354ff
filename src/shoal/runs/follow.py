"""Follows a run by the files in its folder, from its launch or from any later moment."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from shoal.cluster.slurm.spec import in_allocation
from shoal.control.processes import find_processes
from shoal.errors import RunFailed, from_dict
from shoal.events import Event, EventTail
from shoal.records.run_tails import RunTails
from shoal.run_folder import RunFolder
from shoal.runs import confirm
from shoal.runs.supervisor import END_SIGNALS, blocked_signals, is_script

POLL_S = 0.05
# The answers to Ctrl-C. They begin on a new line: the terminal has printed ^C in the current one.
STOPPING = b"\nstopping after this step; Ctrl-C again quits now\n"
STOPPING_SCRIPT = b"\nasking the ranks to stop; Ctrl-C again quits now\n"
QUITTING = b"\nquitting now\n"

Supervisor = subprocess.Popen[bytes]
Look = Callable[[list[Event]], None]


class SupervisorLog:
    """The supervisor's events of the newest launch."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tail = EventTail(run.supervisor)
        self.running = False
        self.ended: Event | None = None
        self._questions: list[Event] = []

    @classmethod
    def from_now(cls, run: RunFolder) -> SupervisorLog:
        log = cls(run)
        log._tail.skip_to_end()
        return log

    def poll(self) -> list[Event]:
        """Return the notes since the last poll."""
        notes: list[Event] = []
        for event in self._tail.poll():
            match event["event"]:
                case "supervising":
                    # A later launch of the same run: forget the earlier one.
                    self.running, self.ended, notes, self._questions = False, None, [], []
                case "running" | "submitted":
                    self.running = True
                case "ended":
                    self.ended = event
                case "note":
                    notes.append(event)
                case confirm.QUESTION:
                    self._questions.append(event)
        return notes

    def take_questions(self) -> list[Event]:
        """Return the supervisor's questions to the owner, each once."""
        questions, self._questions = self._questions, []
        return questions

    def raise_error(self) -> None:
        """Raise the error that ended the run, if one did, or that the supervisor is gone."""
        if self.ended is None:
            if not self._run.supervisor.exists():
                raise self._run.removed()
            raise self._unsupervised()
        if self.ended["code"]:
            error = from_dict(self.ended)
            error.exit_code = int(self.ended["code"])
            raise error

    def _unsupervised(self) -> RunFailed:
        run, seen = shlex.quote(str(self._run.path)), f"the supervisor of the run {self._run.path} was killed"
        if find_processes(self._run.path):
            why = "the agents and their ranks go on without it where they can"
            return RunFailed(seen, why=why, fix=f"see what is left: shoal ps\nend that: shoal stop {run}")
        if self._run.has_checkpoint():
            verb = "run" if is_script(self._run) else "train"
            fix = f"continue from the last checkpoint: shoal {verb} --resume {run}"
        else:
            fix = f"see what it printed: shoal logs {run}"
        return RunFailed(seen, why="none of its processes runs on this machine any more", fix=fix)


def follow(supervisor: Supervisor, log: SupervisorLog, look: Look) -> None:
    """Follow the run until the supervisor has ended, and raise its error."""
    _poll_while(lambda: supervisor.poll() is None, supervisor, log, look)
    log.raise_error()


def await_running(supervisor: Supervisor, log: SupervisorLog, look: Look) -> None:
    """Follow the run until its ranks have been started, for `--detach`: raise errors of the start here."""
    _poll_while(lambda: supervisor.poll() is None and not log.running, supervisor, log, look)
    if not log.running or log.ended is not None:
        log.raise_error()
    # Popen must not warn about a child that still runs: this process no longer waits for it.
    supervisor.returncode = supervisor.returncode or 0


def _poll_while(condition: Callable[[], bool], supervisor: Supervisor, log: SupervisorLog, look: Look) -> None:
    """Call `look` with new notes and ask the supervisor's questions at the terminal, until the condition is false."""
    with contextlib.closing(confirm.ConfirmPrompt(supervisor.stdin)) as prompt:
        while condition():
            look(log.poll())
            prompt.look(log.take_questions())
            time.sleep(POLL_S)
    look(log.poll())


@contextlib.contextmanager
def forwarding_signals(start: Callable[[], Supervisor], answer: bytes = STOPPING) -> Iterator[Supervisor]:
    """Start a supervisor and pass Ctrl-C on to it, also one that comes while it is being started; print `answer`."""

    count = 0

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        if signum == signal.SIGTERM and in_allocation():
            # Not as Ctrl-C: the supervisor may have it too, and would end at once after two of those.
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGTERM)
            return
        count += 1
        if signum == signal.SIGINT:
            # Not by print: the handler may have interrupted a print.
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), answer if count == 1 else QUITTING)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGINT)

    with blocked_signals(END_SIGNALS):
        supervisor = start()
        before = {signum: signal.signal(signum, pass_on) for signum in END_SIGNALS}
    try:
        yield supervisor
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class RunEvents:
    """The events that the ranks of a training write from now on, including ranks that join later.

    With `all_launches`, those that they have written so far come first.
    """

    def __init__(self, run: RunFolder, all_launches: bool = False) -> None:
        self._run = run
        self._tails = RunTails(run, "rank")
        if not all_launches:
            self._tails.skip_to_end()

    def poll(self) -> list[Event]:
        events = [event for _, events in self._tails.poll() for event in events]
        return [
            {**event, "fix": self._run.name_in(event["fix"])} if event["event"] == "warning" else event
            for event in events
        ]

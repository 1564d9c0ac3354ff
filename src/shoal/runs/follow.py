"""Following a run by what its folder says, from its launch or from anywhere in the middle."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from types import FrameType

from shoal.errors import RunFailed, ShoalError, from_dict
from shoal.events import Event, EventTail
from shoal.run_folder import RunFolder
from shoal.runs import confirm
from shoal.runs.supervisor import ENDING, held_back

POLL_S = 0.05


class SupervisorLog:
    """The supervisor's own words, from this launch on."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tail = EventTail(run.supervisor)
        self.running = False
        self.ended: Event | None = None
        self._questions: list[Event] = []

    @classmethod
    def from_now(cls, run: RunFolder) -> SupervisorLog:
        keeping = cls(run)
        keeping._tail.skip_to_end()
        return keeping

    def poll(self) -> list[Event]:
        """Its notes since the last look."""
        notes: list[Event] = []
        for event in self._tail.poll():
            match event["event"]:
                case "keeping":
                    # A later launch of the same run: what stood before is history.
                    self.running, self.ended, notes, self._questions = False, None, [], []
                case "running":
                    self.running = True
                case "ended":
                    self.ended = event
                case "note":
                    notes.append(event)
                case confirm.QUESTION:
                    self._questions.append(event)
        return notes

    def take_questions(self) -> list[Event]:
        """What the supervisor wants to know of the owner, each once."""
        questions, self._questions = self._questions, []
        return questions

    def raise_error(self) -> None:
        if self.ended is None:
            raise supervisor_lost(self._run) if self._run.supervisor.exists() else self._run.removed()
        if self.ended["code"]:
            error = from_dict(self.ended)
            error.exit_code = int(self.ended["code"])
            raise error


def supervisor_lost(run: RunFolder) -> ShoalError:
    folder = shlex.quote(str(run.path))
    return RunFailed(
        f"whoever kept the run {run.path} was killed",
        why="the ranks' agents go on without it where they can",
        fix=f"see what is left: shoal ps; end that: shoal stop {folder}",
    )


def follow(
    run: RunFolder, supervisor: subprocess.Popen[bytes], keeping: SupervisorLog, look: Callable[[list[Event]], None]
) -> None:
    """Until the supervisor has ended; Ctrl-C is passed on to it. Raises what it said went wrong."""
    with contextlib.closing(confirm.ConfirmPrompt(supervisor.stdin)) as answering:
        while supervisor.poll() is None:
            look(keeping.poll())
            answering.look(keeping.take_questions())
            time.sleep(POLL_S)
    look(keeping.poll())
    keeping.raise_error()


def await_running(
    supervisor: subprocess.Popen[bytes], keeping: SupervisorLog, look: Callable[[list[Event]], None]
) -> None:
    """For `--detach`: until the ranks have been started, so that what goes wrong before is still said here."""
    with contextlib.closing(confirm.ConfirmPrompt(supervisor.stdin)) as answering:
        while supervisor.poll() is None and not keeping.running:
            look(keeping.poll())
            answering.look(keeping.take_questions())
            time.sleep(POLL_S)
    look(keeping.poll())
    if not keeping.running or keeping.ended is not None:
        keeping.raise_error()
    # It is nobody's child to wait for from here on.
    supervisor.returncode = supervisor.returncode or 0


@contextlib.contextmanager
def kept(start: Callable[[], subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor, from its first moment on: a signal that comes while it is being started is passed on, too."""
    with contextlib.ExitStack() as stack:
        with held_back(ENDING):
            supervisor = start()
            stack.enter_context(_passing_on(supervisor))
        yield supervisor


@contextlib.contextmanager
def _passing_on(supervisor: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGINT)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class RunEvents:
    """What the ranks of a training write from now on; however many there are, and whenever they come."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tails: dict[int, EventTail] = {}
        self._find()
        for tail in self._tails.values():
            tail.skip_to_end()

    def poll(self) -> list[Event]:
        self._find()
        events = (event for rank, tail in self._tails.items() for event in tail.poll() if _is_of(rank, event))
        return [_with_folder(event, self._run) for event in events]

    def _find(self) -> None:
        for rank, path in self._run.event_files().items():
            if rank not in self._tails:
                self._tails[rank] = EventTail(path)


def _with_folder(event: Event, run: RunFolder) -> Event:
    if event["event"] != "warning" or not isinstance(event.get("fix"), str):
        return event
    return {**event, "fix": run.name_in(event["fix"])}


def _is_of(rank: int, event: Event) -> bool:
    """Whether a line is an event of that rank: a machine that joined may write anything into its own rank's file."""
    return isinstance(event.get("event"), str) and event.get("rank") == rank

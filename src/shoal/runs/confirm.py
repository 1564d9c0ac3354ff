"""`--confirm`: asks the owner of a run at the terminal before a machine that joins gets anything.

`shoal host RUN` asks by itself. For a run that starts, the supervisor has no terminal: it writes the question to
`supervisor.jsonl`, the command at the terminal asks, and sends the answer to the supervisor's standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
from typing import IO

from shoal.control.orders import read_stdin
from shoal.errors import UsageError
from shoal.events import Event, EventLog

# The event of a question, with its number and its text.
QUESTION = "question"
_POLL_S = 0.1
_YES = ("y", "yes")


def require_terminal() -> None:
    """Refuse `--confirm` where the question could not be seen or answered."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "--confirm needs a terminal to ask at",
            why="standard input or the error output of this command is no terminal, so no machine could ever be let in",
            fix="type the command at a terminal, or leave --confirm out",
        )


class TerminalQuestion:
    """One question at the terminal. It is polled, so that signals and the end of the run are noticed meanwhile."""

    def __init__(self, text: str) -> None:
        # Input typed before the question was shown is not an answer to it.
        with contextlib.suppress(OSError):
            import termios

            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        sys.stderr.write(f"{text} [y/N] ")
        sys.stderr.flush()

    def poll(self) -> bool | None:
        """Return the answer, or None while there is none. The end of the input is a no."""
        fd = sys.stdin.fileno()
        if not select.select([fd], [], [], 0.0)[0]:
            return None
        return os.read(fd, 1024).decode(errors="replace").strip().lower() in _YES


async def ask_at_terminal(text: str) -> bool:
    question = TerminalQuestion(text)
    while (answer := question.poll()) is None:
        await asyncio.sleep(_POLL_S)
    return answer


class PipeConfirm:
    """The supervisor's side: writes questions to its log and reads answers from its standard input."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._number = 0
        self._lines: asyncio.StreamReader | None = None

    async def __call__(self, text: str) -> bool:
        if self._lines is None:
            self._lines = await read_stdin()
        self._number += 1
        self._log.write(QUESTION, number=self._number, text=text)
        while line := await self._lines.readline():
            number, _, answer = line.decode(errors="replace").strip().partition(" ")
            if number == str(self._number):
                return answer in _YES
        # The command at the terminal has ended: no answer will come.
        return False


class ConfirmPrompt:
    """The terminal's side: asks the supervisor's questions one by one, and sends it the answers."""

    def __init__(self, answers: IO[bytes] | None) -> None:
        self._answers = answers
        self._waiting: list[Event] = []
        self._shown: TerminalQuestion | None = None

    def look(self, questions: list[Event]) -> None:
        if self._answers is None:
            return
        self._waiting += questions
        if self._waiting and self._shown is None:
            self._shown = TerminalQuestion(str(self._waiting[0]["text"]))
        if self._shown is None or (answer := self._shown.poll()) is None:
            return
        number, self._shown = self._waiting.pop(0)["number"], None
        with contextlib.suppress(BrokenPipeError):
            self._answers.write(f"{number} {'yes' if answer else 'no'}\n".encode())
            self._answers.flush()

    def close(self) -> None:
        if self._answers is not None:
            with contextlib.suppress(OSError):
                self._answers.close()

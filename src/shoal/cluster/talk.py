"""A conversation with a program on a node: one JSON line asked, one JSON line answered.

For looking around before a run (`doctor`, `probe`), where there is no agent yet and perhaps no torch either.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Protocol

from shoal.errors import ControlError

# How long a program may take to end once its stdin has, and to die.
_END_S = 2.0
_KILL_S = 1.0
_LONGEST_ANSWER = 16 << 20

Answer = dict[str, Any]


class Speaker(Protocol):
    """What stands at the other end of two pipes: a process here, on an emulated node, or behind SSH."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def errors(self) -> str: ...
    def close(self) -> None: ...


class Talk:
    def __init__(self, node: str, speaker: Speaker) -> None:
        self.node = node
        self._speaker = speaker
        self._heard = bytearray()

    def ask(self, deadline_s: float, **request: Any) -> Answer:
        """Raises `ControlError` when the program is gone, silent, or answers with an error."""
        self.send(**request)
        return self.hear(deadline_s, str(request.get("do", "")))

    def send(self, **request: Any) -> None:
        """Without waiting: to have several nodes at work at once, then `hear` each of them."""
        with contextlib.suppress(BrokenPipeError):
            self._speaker.stdin.write(json.dumps(request).encode() + b"\n")
            self._speaker.stdin.flush()

    def hear(self, deadline_s: float, about: str = "") -> Answer:
        line = self._line(time.monotonic() + deadline_s, about)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.node} answered something else than asked", why=line.decode(errors="replace")[:200]
            )
        if "error" in answer:
            raise ControlError(f"{self.node} could not {about or 'answer'}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._speaker.close()

    def _line(self, deadline: float, about: str) -> bytes:
        searched = 0
        # Only in what is new: a long line is not searched again with every block.
        while (end := self._heard.find(b"\n", searched)) < 0:
            searched = len(self._heard)
            ready, _, _ = select.select([self._speaker.stdout], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._speaker.stdout.fileno(), 1 << 16) if ready else None
            if block is None:
                raise ControlError(
                    f"{self.node} gave no answer to {about!r} in time", why=self._speaker.errors().strip()
                )
            if not block:
                raise ControlError(
                    f"{self.node} ended before it answered {about!r}", why=self._speaker.errors().strip()
                )
            self._heard += block
            if len(self._heard) > _LONGEST_ANSWER:
                self._heard.clear()
                raise ControlError(
                    f"{self.node} answered {about!r} with a line of more than {_LONGEST_ANSWER} bytes",
                    why="what answers there is no program of shoal, or was tampered with",
                )
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line


class Process:
    """A speaker on this machine, or on an emulated node of it; it ends when its stdin does."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        assert self._process.stdin is not None  # noqa: S101 - both were asked for
        assert self._process.stdout is not None  # noqa: S101
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        if self._process.poll() is None:
            self._process.kill()
            # A frozen process does not even die (version 1 control groups): it will when it is thawed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_S)
        self._errors.close()


def module_command(module: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-m", module]


@contextlib.contextmanager
def closing_all(talks: Mapping[str, Talk]) -> Iterator[None]:
    try:
        yield
    finally:
        # At once: to leave a frozen one behind takes seconds.
        with ThreadPoolExecutor(max_workers=max(1, len(talks))) as pool:
            list(pool.map(Talk.close, talks.values()))


def ask_each(
    talks: Mapping[str, Talk], requests: Mapping[str, Answer], deadline_s: float
) -> tuple[dict[str, Answer], dict[str, ControlError]]:
    """All at once: what each of them answered, or why not, within one deadline for all."""
    until = time.monotonic() + deadline_s
    answers, errors = {}, {}
    for name, request in requests.items():
        talks[name].send(**request)
    for name, request in requests.items():
        try:
            answers[name] = talks[name].hear(max(0.0, until - time.monotonic()), str(request["do"]))
        except ControlError as error:
            errors[name] = error
    return answers, errors

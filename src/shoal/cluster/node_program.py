"""A program on a node that answers lines of JSON with lines of JSON, and the end that asks it.

For `doctor` and `probe`: there is no agent on the node yet, and perhaps no torch.
It needs the standard library only: `shoal doctor` also looks at machines whose Python has nothing installed.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Protocol

from shoal.errors import ControlError

# How long a program may take to end after its stdin was closed, and to die after SIGKILL.
_END_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 1.0
_MOST_ANSWER_BYTES = 16 << 20

Answer = dict[str, Any]
Handler = Callable[[dict[str, Any]], Answer]


def answer_requests(answers: Mapping[str, Handler]) -> None:
    """Answer each JSON line on stdin with one on stdout, until stdin ends. `answers` are found by a request's "do".

    A request that fails is answered with its error; the traceback goes to stderr.
    """
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = answers[request["do"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class RemoteEnd(Protocol):
    """The process at the other end of two pipes: here, on an emulated node, or behind SSH."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def errors(self) -> str: ...
    def close(self) -> None: ...


class RemoteProgram:
    def __init__(self, node: str, process: RemoteEnd) -> None:
        self.node = node
        self._process = process
        self._buffer = bytearray()

    def ask(self, deadline_s: float, **request: Any) -> Answer:
        """Send a request and return its answer. Raise `ControlError` when the program has ended, does not answer in
        time, or answers with an error."""
        self.send(**request)
        return self.receive_answer(deadline_s, str(request.get("do", "")))

    def send(self, **request: Any) -> None:
        """Send a request without waiting for its answer, so that several nodes can work at once."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive_answer(self, deadline_s: float, about: str = "") -> Answer:
        line = self._read_line(time.monotonic() + deadline_s, about)
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
        self._process.close()

    def _read_line(self, deadline: float, about: str) -> bytes:
        searched = 0  # a long line is not searched again with every block
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ControlError(
                    f"{self.node} gave no answer to {about!r} in time", why=self._process.errors().strip()
                )
            block = os.read(self._process.stdout.fileno(), 1 << 16)
            if not block:
                raise ControlError(
                    f"{self.node} ended before it answered {about!r}", why=self._process.errors().strip()
                )
            self._buffer += block
            if len(self._buffer) > _MOST_ANSWER_BYTES:
                self._buffer.clear()
                raise ControlError(
                    f"{self.node} answered {about!r} with a line of more than {_MOST_ANSWER_BYTES} bytes",
                    why="what answers there is not a program of shoal, or was tampered with",
                )
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class LocalProgram:
    """A program on this machine or on an emulated node; it ends when its stdin is closed."""

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
            self._process.wait(timeout=_END_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            # A frozen process in a version 1 control group dies only when it is thawed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_TIMEOUT_S)
        self._errors.close()


def module_command(module: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-m", module]


@contextlib.contextmanager
def closing_all(programs: Mapping[str, RemoteProgram]) -> Iterator[None]:
    try:
        yield
    finally:
        # All at once: closing a frozen one takes seconds.
        with ThreadPoolExecutor(max_workers=max(1, len(programs))) as pool:
            list(pool.map(RemoteProgram.close, programs.values()))


def ask_each(
    programs: Mapping[str, RemoteProgram], requests: Mapping[str, Answer], deadline_s: float
) -> tuple[dict[str, Answer], dict[str, ControlError]]:
    """Ask several nodes at once, within one deadline for all; return their answers and errors."""
    deadline = time.monotonic() + deadline_s
    answers, errors = {}, {}
    for name, request in requests.items():
        programs[name].send(**request)
    for name, request in requests.items():
        try:
            answers[name] = programs[name].receive_answer(max(0.0, deadline - time.monotonic()), str(request["do"]))
        except ControlError as error:
            errors[name] = error
    return answers, errors

"""A script on a host: the system's ssh with the user's configuration, and plain sh on this very machine.

The remote command is always the two words `sh -s`, so nothing is quoted for two shells; the script travels over stdin.
It is one brace group, which a shell reads to its end before it does any of it, and its first act is to print a mark.
Only after the mark do we send what the script's own programs shall read: dash reads ahead of the command it is at
(seen: the first 8 kB of a payload gone). And whatever a login shell prints before the mark is no answer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from shoal.cluster.hosts.explain import CONNECT_TIMEOUT_S, SSH_FAILED, explain, gone, silent, ssh_missing, ssh_words
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here

# A host that vanished in the middle of something is noticed after two unanswered questions.
ALIVE_INTERVAL_S = 5
ALIVE_MISSED = 2
ANSWER_S = 30.0
_MOST_ERRORS_BYTES = 1 << 20

OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_INTERVAL_S}",
    f"ServerAliveCountMax={ALIVE_MISSED}",
    # The user's settings may ask for these; a master in the background would outlive us and hold our pipes open.
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)


@dataclass(frozen=True)
class Result:
    """How a script ended, and what it said."""

    returncode: int
    stdout: bytes
    stderr: str


def ssh_argv(host: Host, spec: HostsSpec) -> list[str]:
    """Without the remote command. Host keys are checked as the user's configuration has it."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    return [*ssh_words(spec), "-T", *options, "--", host.host]


def script_argv(host: Host, spec: HostsSpec) -> list[str]:
    return ["sh", "-s"] if is_here(host) else [*ssh_argv(host, spec), "sh", "-s"]


_at_work: weakref.WeakSet[Script] = weakref.WeakSet()


def end_all_scripts() -> None:
    """For whoever is interrupted while several are at work in threads of their own."""
    for script in list(_at_work):
        script.process.kill()


class Script:
    """A script at work on a host. After `start`, stdin and stdout are those of the program it runs, or has become."""

    def __init__(self, host: Host, spec: HostsSpec, own_session: bool = False) -> None:
        self.host, self.spec = host, spec
        # In a file: a pipe that nobody reads would stop the other side once it is full.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        argv = script_argv(host, spec)
        self._own_session = own_session or is_here(host)
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=self._own_session,
            )
        except FileNotFoundError:
            self._errors.close()
            raise ssh_missing(argv[0]) from None
        assert self.process.stdin is not None  # noqa: S101 - both were asked for
        assert self.process.stdout is not None  # noqa: S101
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        _at_work.add(self)

    def start(self, script: str, deadline_s: float = ANSWER_S) -> None:
        """Returns when the host has read the whole script and begins with it; raises why it does not."""
        mark = f"shoal-{secrets.token_hex(8)}"
        self.send([framed(script, mark).encode()])
        if not self._hears(f"\n{mark}\n".encode(), time.monotonic() + deadline_s):
            raise explain(self.host, self.spec, self.process.wait(), self.errors())

    def send(self, chunks: Iterable[bytes]) -> None:
        """To its stdin. When nobody reads it any more, its answer will say why."""
        with contextlib.suppress(BrokenPipeError):
            for chunk in chunks:
                # Unbuffered, so a signal may leave some of it unwritten.
                rest = memoryview(chunk)
                while rest:
                    rest = rest[self.stdin.write(rest) or 0 :]

    def errors(self) -> str:
        """What it wrote to stderr so far. Read without moving: the other side writes at the same position."""
        return os.pread(self._errors.fileno(), _MOST_ERRORS_BYTES, 0).decode(errors="replace")

    def kill(self) -> None:
        """Over SSH the link; here whatever the shell has started too, which would hold our pipes."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL) if self._own_session else self.process.kill()

    def close(self) -> None:
        """Ends our side. Over SSH the program there loses its stdin and stdout with it."""
        self.kill()
        for pipe in (self.stdin, self.stdout, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _hears(self, mark: bytes, deadline: float) -> bool:
        """False when it ended without the mark. Byte by byte: what follows belongs to somebody else."""
        heard = b""
        while not heard.endswith(mark):
            ready, _, _ = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise silent(self.host, self.spec, "did not begin with a script in time", self.errors())
            byte = self.stdout.read(1)
            if not byte:
                return False
            # No more than the mark itself: a machine may print without end before it.
            heard = (heard + byte)[-len(mark) :]
        return True


def framed(script: str, mark: str) -> str:
    return f"{{\nprintf '\\n%s\\n' {mark}\n{script}\nexit\n}}\n"


def run_script(
    host: Host,
    spec: HostsSpec,
    script: str,
    stdin: Iterable[bytes] = (),
    deadline_s: float = ANSWER_S,
) -> Result:
    """Runs a script to its end and gives what it said; raises only when the host could not be reached, or was lost."""
    with Script(host, spec) as running:
        running.start(script, min(ANSWER_S, deadline_s))
        with _ended_after(running, deadline_s) as late, _read_along(running) as said:
            running.send(stdin)
            running.stdin.close()
            code = running.process.wait()
        if late.is_set():
            raise silent(host, spec, f"gave no answer within {deadline_s:.0f} s", running.errors())
        if code == SSH_FAILED and not is_here(host):
            raise gone(host, code, running.errors())
        return Result(code, b"".join(said), running.errors())


def variables(**values: str) -> str:
    """Values for a script, whatever they contain: one assignment a line."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def shell_path(path: str) -> str:
    """A word of a script; `~/` is the home of whoever runs it."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


@contextlib.contextmanager
def _read_along(running: Script) -> Iterator[list[bytes]]:
    """All of it, once the block is left: a program that answers before it has read everything must not be stuck."""
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(running.stdout.read()), daemon=True)
    reader.start()
    try:
        yield said
    except BaseException:
        running.kill()
        raise
    finally:
        reader.join()


@contextlib.contextmanager
def _ended_after(running: Script, deadline_s: float) -> Iterator[threading.Event]:
    late = threading.Event()

    def end() -> None:
        late.set()
        running.kill()

    timer = threading.Timer(deadline_s, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()

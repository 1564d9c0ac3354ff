"""A script on a host: the system's ssh with the user's configuration, and plain sh on this very machine.

The remote command is always the two words `sh -s`, so nothing is quoted for two shells; the script travels over stdin.
It is one brace group, which a shell reads to its end before it does any of it, and its first act is to print a mark.
Only after the mark do we send what the script's own programs shall read: dash reads ahead of the command it is at
(seen: the first 8 kB of a payload gone). And whatever a login shell prints before the mark is no answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TypeVar

from shoal.cluster.hosts.spec import Host, HostsSpec, is_here, machine_of
from shoal.errors import HostError, ShoalError

# SECTION cluster/hosts/explain
# Why a host cannot be used, from what ssh said about it. Pure.


CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255
_LOST = re.compile(r"not responding|Broken pipe|closed by remote host|Connection (?:reset|to \S+ closed)|timed out")
_CHANGED_KEY = re.compile(r"Offending \S+ key in (\S+?):\d+")
_KEY_OF = re.compile(r"[Hh]ost key for (\S+) has changed|host key is known for (\S+) and")
_CONFIG = re.compile(
    r"Bad configuration option|terminating, \d+ bad configuration|Can't open user config file|Bad owner"
)
_BUSY = re.compile(r"kex_exchange_identification|Connection (?:closed|reset) by")


def explain(host: Host, spec: HostsSpec, returncode: int, stderr: str) -> HostError:
    """Of an ssh that ended before a script could begin."""
    for pattern, say in _REASONS:
        if re.search(pattern, stderr):
            return say(host, spec, stderr)
    if returncode != SSH_FAILED:
        return _no_shell(host, spec, returncode, stderr)
    return HostError(
        f"cannot reach {host.name} over ssh",
        why=_tail(stderr) or "ssh did not say why",
        fix=f"{by_hand(host, spec)} -v",
    )


def ssh_words(spec: HostsSpec) -> list[str]:
    return ["ssh", *(("-F", str(spec.ssh_config)) if spec.ssh_config else ())]


def by_hand(host: Host, spec: HostsSpec, *options: str) -> str:
    """What a user types to see for themselves."""
    return shlex.join([*ssh_words(spec), *options, host.host])


def ssh_missing(program: str) -> HostError:
    return HostError(
        f"{program} is not installed here", why="shoal reaches other machines with it", fix="apt install openssh-client"
    )


def silent(host: Host, spec: HostsSpec, what: str, stderr: str) -> HostError:
    return HostError(
        f"{host.name} {what}",
        why=_tail(stderr) or "it is overloaded, asleep, or a program of its login shell waits for input",
        fix=f"see how long this takes: time {by_hand(host, spec)} true",
    )


def gone(host: Host, returncode: int, stderr: str) -> HostError:
    """Of a script that had begun. ssh ends with 255 both when the link was lost and when the program was killed."""
    if returncode != SSH_FAILED or not _LOST.search(stderr):
        return HostError(
            f"what was running on {host.name} ended without an answer",
            why=_tail(stderr) or "somebody killed it, or its machine ran out of memory",
            fix="run the same command again",
        )
    return HostError(
        f"the connection to {host.name} was lost",
        why=_tail(stderr) or "it went off the network, fell asleep or was shut down",
        fix="run the same command again when it is back: what was done there is kept",
    )


def _unknown_name(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"no machine is known by the name {_asked(stderr) or machine_of(host.host)}",
        why="neither the ssh configuration nor the name service knows it",
        fix=f"correct it in {spec.path}, write its address, or add it to ~/.ssh/config",
    )


def _refused(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} is there, but no SSH server answers",
        why=_tail(stderr),
        fix="on that machine: sudo apt install openssh-server",
    )


def _no_route(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"there is no way to {host.name} on the network",
        why=_tail(stderr),
        fix=f"is it on, and on the same network? ping -c 3 {shlex.quote(machine_of(host.host))}",
    )


def _timed_out(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} did not answer within {CONNECT_TIMEOUT_S} s",
        why="it is off or asleep, or a firewall swallows what is sent to it: " + _tail(stderr),
        fix=f"wake it, then try: {by_hand(host, spec)} true",
    )


def _denied(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} does not let us in",
        why=f"{_tail(stderr)}: the user is wrong, or none of our keys is known there (a key with a passphrase must be "
        "in the agent: ssh-add)",
        fix=f"ssh-copy-id {shlex.join(ssh_words(spec)[1:])} {shlex.quote(host.host)}".replace("  ", " "),
    )


def _changed_key(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    file = match[1] if (match := _CHANGED_KEY.search(stderr)) else "~/.ssh/known_hosts"
    name = _key_name(host, stderr)
    return HostError(
        f"the host key of {host.name} has changed",
        why="it was installed anew, or another machine has its address; ask whose it is before you trust it",
        fix=f"ssh-keygen -f {shlex.quote(file)} -R {shlex.quote(name)}, then: {by_hand(host, spec)}",
    )


def _unknown_key(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    # Where the configuration forbids unknown keys, ssh would not even ask.
    asking = ("-o", "StrictHostKeyChecking=ask") if "requested strict checking" in stderr else ()
    return HostError(
        f"the host key of {host.name} is not known here",
        why="we were never connected to it by this name, so nothing tells it from another machine",
        fix=f"connect once, compare the key and say yes: {by_hand(host, spec, *asking)}",
    )


def _bad_config(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        "ssh does not accept its configuration", why=_tail(stderr), fix=f"correct it: {by_hand(host, spec)} -v"
    )


def _hung_up(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} answered and hung up",
        why=f"{_tail(stderr)}: too many connections at once, or its SSH server refuses this machine",
        fix=f"see what it says: {by_hand(host, spec)} -v",
    )


def _no_shell(host: Host, spec: HostsSpec, returncode: int, stderr: str) -> HostError:
    return HostError(
        f"{host.name} let us in, but there is no shell to run a script with",
        why=_tail(stderr) or f"`sh -s` ended with {returncode} before it read anything",
        fix=f"this must print hello: {by_hand(host, spec)} sh -c 'echo hello'",
    )


_REASONS: tuple[tuple[str | re.Pattern[str], Callable[[Host, HostsSpec, str], HostError]], ...] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", _changed_key),
    ("Could not resolve hostname", _unknown_name),
    ("[Hh]ost key verification failed", _unknown_key),
    ("Permission denied|Too many authentication failures", _denied),
    (_CONFIG, _bad_config),
    ("timed out", _timed_out),
    ("Connection refused", _refused),
    ("No route to host|[Nn]etwork is unreachable", _no_route),
    (_BUSY, _hung_up),
)


def _key_name(host: Host, stderr: str) -> str:
    """By which ssh keeps the key: what the configuration makes of the host, in brackets with an odd port."""
    match = _KEY_OF.search(stderr)
    return (match[1] or match[2]) if match else machine_of(host.host)


def _asked(stderr: str) -> str:
    match = re.search(r"resolve hostname (\S+):", stderr)
    return match[1] if match else ""


def _tail(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


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
class ScriptResult:
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


_at_work: weakref.WeakSet[RemoteScript] = weakref.WeakSet()


def end_all_scripts() -> None:
    """For whoever is interrupted while several are at work in threads of their own."""
    for script in list(_at_work):
        script.process.kill()


class RemoteScript:
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

    def __enter__(self) -> RemoteScript:
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
) -> ScriptResult:
    """Runs a script to its end and gives what it said; raises only when the host could not be reached, or was lost."""
    with RemoteScript(host, spec) as running:
        running.start(script, min(ANSWER_S, deadline_s))
        with _ended_after(running, deadline_s) as late, _read_along(running) as said:
            running.send(stdin)
            running.stdin.close()
            code = running.process.wait()
        if late.is_set():
            raise silent(host, spec, f"gave no answer within {deadline_s:.0f} s", running.errors())
        if code == SSH_FAILED and not is_here(host):
            raise gone(host, code, running.errors())
        return ScriptResult(code, b"".join(said), running.errors())


def variables(**values: str) -> str:
    """Values for a script, whatever they contain: one assignment a line."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def shell_path(path: str) -> str:
    """A word of a script; `~/` is the home of whoever runs it."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


@contextlib.contextmanager
def _read_along(running: RemoteScript) -> Iterator[list[bytes]]:
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
def _ended_after(running: RemoteScript, deadline_s: float) -> Iterator[threading.Event]:
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


# SECTION cluster/hosts/each
# The same for every host at once: they are slow one after another, and do not wait for each other.


T = TypeVar("T")

_AT_ONCE = 32


def on_each(hosts: Iterable[Host], work: Callable[[Host], T]) -> dict[str, T | ShoalError]:
    """By the host's name: what came of it, or the error."""

    def attempt(host: Host) -> T | ShoalError:
        try:
            return work(host)
        except ShoalError as error:
            return error

    hosts = list(hosts)
    pool = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="host")
    try:
        return dict(zip((host.name for host in hosts), pool.map(attempt, hosts), strict=True))
    except BaseException:
        # Ctrl-C: the threads wait for their connections, and would keep us until a copy of an hour is done.
        end_all_scripts()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def values_or_raise(results: Mapping[str, T | ShoalError]) -> dict[str, T]:
    """Every value; or one error that names every host that failed."""
    values: dict[str, T] = {}
    errors: list[ShoalError] = []
    for name, result in results.items():
        if isinstance(result, ShoalError):
            errors.append(result)
        else:
            values[name] = result
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise summed(errors, len(results))
    return values


def summed(errors: list[ShoalError], of: int) -> HostError:
    each = "\n".join(error.seen + (f" ({error.why})" if error.why else "") for error in errors)
    return HostError(f"{len(errors)} of {of} hosts cannot be used", why=each, fix=errors[0].fix)

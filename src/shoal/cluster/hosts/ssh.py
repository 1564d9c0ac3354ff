"""Run a shell script on a host: with the system's ssh and the user's configuration, or with plain sh on this machine.

The remote command is always the two words `sh -s`, so nothing is quoted for two shells; the script is sent over stdin.
It is one brace group, which a shell reads to its end before it runs any of it, and its first command prints a mark.
Input for the script's own programs is sent only after the mark: dash reads ahead of the command it runs (seen: the
first 8 kB of a payload gone). What a login shell prints before the mark is ignored.
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

T = TypeVar("T")

SSH_FAILED = 255
CONNECT_TIMEOUT_S = 10
ANSWER_S = 30.0
_MOST_ERROR_BYTES = 1 << 20
_MOST_CONNECTIONS = 32
_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    # A host that disappears is noticed after two unanswered requests.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=2",
    # The user's settings may enable these; a master in the background would outlive this process and hold its pipes.
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)


def ssh_words(spec: HostsSpec) -> list[str]:
    return ["ssh", *(("-F", str(spec.ssh_config)) if spec.ssh_config else ())]


def ssh_argv(host: Host, spec: HostsSpec) -> list[str]:
    """Return ssh without the remote command. Host keys are checked as the user's configuration says."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [*ssh_words(spec), "-T", *options, "--", host.host]


def by_hand(host: Host, spec: HostsSpec, *options: str) -> str:
    """Return the ssh command that a user types to try it."""
    return shlex.join([*ssh_words(spec), *options, host.host])


def variables(**values: str) -> str:
    """Return shell assignments for a script, one a line, whatever characters the values contain."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def shell_path(path: str) -> str:
    """Quote a path for a script; `~/` is the home of the user who runs it."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def framed(script: str, mark: str) -> str:
    return f"{{\nprintf '\\n%s\\n' {mark}\n{script}\nexit\n}}\n"


_running: weakref.WeakSet[RemoteScript] = weakref.WeakSet()


class RemoteScript:
    """A running script on a host. After `start`, stdin and stdout are those of the program it runs or has become."""

    def __init__(self, host: Host, spec: HostsSpec, own_session: bool = False) -> None:
        self.host, self.spec = host, spec
        # A file: a full pipe that is not read would stop the other side.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        argv = ["sh", "-s"] if is_here(host) else [*ssh_argv(host, spec), "sh", "-s"]
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
        _running.add(self)

    def start(self, script: str, deadline_s: float = ANSWER_S) -> None:
        """Return when the host has read the whole script and begins to run it; raise the reason when it does not."""
        mark = f"shoal-{secrets.token_hex(8)}"
        self.send([framed(script, mark).encode()])
        if not self._await_mark(f"\n{mark}\n".encode(), time.monotonic() + deadline_s):
            raise explain(self.host, self.spec, self.process.wait(), self.errors())

    def send(self, chunks: Iterable[bytes]) -> None:
        """Write to its stdin. When the script does not read it any more, its answer says why."""
        with contextlib.suppress(BrokenPipeError):
            for chunk in chunks:
                # The pipe is unbuffered: a signal may leave some of the chunk unwritten.
                rest = memoryview(chunk)
                while rest:
                    rest = rest[self.stdin.write(rest) or 0 :]

    def errors(self) -> str:
        """Return its stderr so far. pread does not move the file position, at which the script writes."""
        return os.pread(self._errors.fileno(), _MOST_ERROR_BYTES, 0).decode(errors="replace")

    def kill(self) -> None:
        """Kill the connection; on this machine the whole session, which would hold the pipes open."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL) if self._own_session else self.process.kill()

    def close(self) -> None:
        """Close this side. Over SSH the program then loses its stdin and stdout."""
        self.kill()
        for pipe in (self.stdin, self.stdout, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait()

    def __enter__(self) -> RemoteScript:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _await_mark(self, mark: bytes, deadline: float) -> bool:
        """Return False when the script ended without the mark. Read byte by byte: what follows is the caller's."""
        tail = b""
        while not tail.endswith(mark):
            ready, _, _ = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _no_answer(self.host, self.spec, "did not begin with a script in time", self.errors())
            byte = self.stdout.read(1)
            if not byte:
                return False
            # Keep no more than the mark's length: a machine may print without end before it.
            tail = (tail + byte)[-len(mark) :]
        return True


@dataclass(frozen=True)
class ScriptResult:
    returncode: int
    stdout: bytes
    stderr: str


def run_script(
    host: Host, spec: HostsSpec, script: str, stdin: Iterable[bytes] = (), deadline_s: float = ANSWER_S
) -> ScriptResult:
    """Run a script to its end and return its output; raise only when the host cannot be reached or was lost."""
    with RemoteScript(host, spec) as running:
        running.start(script, min(ANSWER_S, deadline_s))
        with _killed_after(running, deadline_s) as is_late, _reading(running) as output:
            running.send(stdin)
            running.stdin.close()
            code = running.process.wait()
        if is_late.is_set():
            raise _no_answer(host, spec, f"gave no answer within {deadline_s:.0f} s", running.errors())
        if code == SSH_FAILED and not is_here(host):
            raise explain_end(host, code, running.errors())
        return ScriptResult(code, b"".join(output), running.errors())


@contextlib.contextmanager
def _reading(running: RemoteScript) -> Iterator[list[bytes]]:
    """Read stdout in a thread: a program that answers before it has read its whole input must not block. The list has
    the output once the block is left."""
    output: list[bytes] = []
    reader = threading.Thread(target=lambda: output.append(running.stdout.read()), daemon=True)
    reader.start()
    try:
        yield output
    except BaseException:
        running.kill()
        raise
    finally:
        reader.join()


@contextlib.contextmanager
def _killed_after(running: RemoteScript, deadline_s: float) -> Iterator[threading.Event]:
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        running.kill()

    timer = threading.Timer(deadline_s, kill)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


# All hosts at once


def on_each(hosts: Iterable[Host], work: Callable[[Host], T]) -> dict[str, T | ShoalError]:
    """Do the same for every host at once; return the result or the error by the host's name."""

    def attempt(host: Host) -> T | ShoalError:
        try:
            return work(host)
        except ShoalError as error:
            return error

    hosts = list(hosts)
    pool = ThreadPoolExecutor(max_workers=_MOST_CONNECTIONS, thread_name_prefix="host")
    try:
        return dict(zip((host.name for host in hosts), pool.map(attempt, hosts), strict=True))
    except BaseException:
        # After Ctrl-C the threads would wait for their connections until a copy of an hour is done.
        for script in list(_running):
            script.process.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def values_or_raise(results: Mapping[str, T | ShoalError]) -> dict[str, T]:
    """Return every value, or raise one error that names every host that failed."""
    errors = [result for result in results.values() if isinstance(result, ShoalError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        why = "\n".join(error.seen + (f" ({error.why})" if error.why else "") for error in errors)
        raise HostError(f"{len(errors)} of {len(results)} hosts cannot be used", why=why, fix=errors[0].fix)
    return {name: result for name, result in results.items() if not isinstance(result, ShoalError)}


# Why a host cannot be used, from ssh's stderr


def explain(host: Host, spec: HostsSpec, returncode: int, stderr: str) -> HostError:
    """Explain an ssh that ended before a script could begin."""
    name, last, try_it = host.name, _last_line(stderr), by_hand(host, spec)
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return _changed_key(host, spec, stderr)
    if "Could not resolve hostname" in stderr:
        match = re.search(r"resolve hostname (\S+):", stderr)
        return HostError(
            f"no machine is known by the name {match[1] if match else machine_of(host.host)}",
            why="neither the ssh configuration nor the name service knows it",
            fix=f"correct it in {spec.path}, write its address, or add it to ~/.ssh/config",
        )
    if re.search("[Hh]ost key verification failed", stderr):
        # Where the configuration forbids unknown keys, ssh would not even ask.
        asking = ("-o", "StrictHostKeyChecking=ask") if "requested strict checking" in stderr else ()
        return HostError(
            f"the host key of {name} is not known here",
            why="this machine was never connected to it by this name, so nothing tells it from another machine",
            fix=f"connect once, compare the key and say yes: {by_hand(host, spec, *asking)}",
        )
    if re.search("Permission denied|Too many authentication failures", stderr):
        return HostError(
            f"{name} does not let this user in",
            why=f"{last}: the user is wrong, or none of this user's keys is known there (a key with a passphrase must "
            "be in the agent: ssh-add)",
            fix=shlex.join(["ssh-copy-id", *ssh_words(spec)[1:], host.host]),
        )
    if re.search(r"Bad configuration option|, \d+ bad configuration|Can't open user config file|Bad owner", stderr):
        return HostError("ssh does not accept its configuration", why=last, fix=f"correct it: {try_it} -v")
    if "timed out" in stderr:
        return HostError(
            f"{name} did not answer within {CONNECT_TIMEOUT_S} s",
            why="it is off or asleep, or a firewall swallows what is sent to it: " + last,
            fix=f"wake it, then try: {try_it} true",
        )
    if "Connection refused" in stderr:
        return HostError(
            f"{name} is there, but no SSH server answers",
            why=last,
            fix="on that machine: sudo apt install openssh-server",
        )
    if re.search("No route to host|[Nn]etwork is unreachable", stderr):
        return HostError(
            f"there is no way to {name} on the network",
            why=last,
            fix=f"is it on, and on the same network? ping -c 3 {shlex.quote(machine_of(host.host))}",
        )
    if re.search("kex_exchange_identification|Connection (?:closed|reset) by", stderr):
        return HostError(
            f"{name} answered and hung up",
            why=f"{last}: too many connections at once, or its SSH server refuses this machine",
            fix=f"see what it says: {try_it} -v",
        )
    if returncode != SSH_FAILED:
        return HostError(
            f"{name} let this user in, but there is no shell to run a script with",
            why=last or f"`sh -s` ended with {returncode} before it read anything",
            fix=f"this must print hello: {try_it} sh -c 'echo hello'",
        )
    return HostError(f"cannot reach {name} over ssh", why=last or "ssh did not say why", fix=f"{try_it} -v")


def _changed_key(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    file = match[1] if (match := re.search(r"Offending \S+ key in (\S+?):\d+", stderr)) else "~/.ssh/known_hosts"
    # ssh stores the key under the name that its configuration gives the host, in brackets with an unusual port.
    match = re.search(r"[Hh]ost key for (\S+) has changed|host key is known for (\S+) and", stderr)
    key_name = (match[1] or match[2]) if match else machine_of(host.host)
    return HostError(
        f"the host key of {host.name} has changed",
        why="it was installed anew, or another machine has its address; ask whose it is before you trust it",
        fix=f"ssh-keygen -f {shlex.quote(file)} -R {shlex.quote(key_name)}, then: {by_hand(host, spec)}",
    )


def explain_end(host: Host, returncode: int, stderr: str) -> HostError:
    """Explain the end of a script that had begun. ssh ends with 255 both for a lost link and a killed program."""
    lost = r"not responding|Broken pipe|closed by remote host|Connection (?:reset|to \S+ closed)|timed out"
    if returncode != SSH_FAILED or not re.search(lost, stderr):
        return HostError(
            f"what was running on {host.name} ended without an answer",
            why=_last_line(stderr) or "it was killed, or its machine ran out of memory",
            fix="run the same command again",
        )
    return HostError(
        f"the connection to {host.name} was lost",
        why=_last_line(stderr) or "it went off the network, fell asleep or was shut down",
        fix="run the same command again when it is back: what was done there is kept",
    )


def ssh_missing(program: str) -> HostError:
    return HostError(
        f"{program} is not installed here", why="shoal reaches other machines with it", fix="apt install openssh-client"
    )


def _no_answer(host: Host, spec: HostsSpec, what: str, stderr: str) -> HostError:
    return HostError(
        f"{host.name} {what}",
        why=_last_line(stderr) or "it is overloaded, asleep, or a program of its login shell waits for input",
        fix=f"see how long this takes: time {by_hand(host, spec)} true",
    )


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""

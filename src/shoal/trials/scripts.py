"""Anybody's script from its start to its end: what `shoal run` does."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import shutil
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.spec import LocalSpec, parse_on, settled
from shoal.errors import UsageError
from shoal.events import Event
from shoal.launch.logs import LogFollower, LogLine
from shoal.runfolder import RunFolder
from shoal.trials.following import Keeping, await_running, follow, kept
from shoal.trials.keeper import Job, start_keeper


class Display(Protocol):
    """Where the lines of ranks and notes about the run are shown. `is_live`: it shows unfinished lines too."""

    is_live: bool

    def lines(self, lines: Sequence[LogLine], current: Sequence[LogLine] = ()) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def run_anything(job: Job, out: Path, detach: bool, display: Display) -> RunFolder:
    """Raises with the script's own exit code."""
    python, about_python = choose_python(job.python, job.on, os.environ)
    source, about_stdin = choose_stdin(job.on, detach)
    job = replace(job, on=settled(job.on), python=python, has_stdin=source is not Source.NONE)
    run = RunFolder.create(out, is_training=False)
    for text in filter(None, (about_python, about_stdin)):
        display.note(text)
    keeping = Keeping.from_now(run)
    logs = LogFollower(run, shows_current=display.is_live)

    def look(notes: list[Event]) -> None:
        for note in notes:
            display.note(note["text"])
        if not detach:
            display.lines(logs.poll(), logs.current())

    with contextlib.ExitStack() as held, contextlib.ExitStack() as relayed:
        lock = held.enter_context(run.held())
        stdin = relayed.enter_context(relay_terminal()) if source is Source.TERMINAL else None
        with kept(lambda: start_keeper(run, job, lock, stdin)) as keeper:
            held.close()
            if stdin is not None:
                os.close(stdin)
            if detach:
                await_running(keeper, keeping, look)
                return run
            try:
                follow(run, keeper, keeping, look)
            finally:
                display.lines(logs.last_words())
                display.close()
    return run


_HAS_TORCH = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 3)"
_ASK_PYTHON_S = 30.0
_LOOK_AT_TERMINAL_S = 0.1
_CLOSE_S = 1.0
_MOST_TYPED_BYTES = 4096


def choose_python(asked: str, on: str, env: Mapping[str, str]) -> tuple[str, str]:
    """The Python that runs a script, empty for each machine's own, and a note about the choice.

    An activated environment is the user's choice of Python; shoal may be installed in another one.
    """
    if isinstance(parse_on(on), HostsSpec):
        return asked, ""
    if asked:
        return _check_python(asked, env), ""
    prefix = active_environment(env)
    if prefix is None:
        return "", ""
    python = str(prefix / "bin" / "python")
    if has_torch(python):
        return python, f"the script runs with {python}, of the activated environment (another one: --python PYTHON)"
    return "", (
        f"the script runs with {sys.executable}: the activated environment {prefix} has no torch "
        f"(to change that: {python} -m pip install torch)"
    )


def _check_python(asked: str, env: Mapping[str, str]) -> str:
    found = shutil.which(asked, path=env.get("PATH"))
    if found is None:
        raise UsageError(
            f"--python {asked} is no program",
            why="the ranks of the script are started with it",
            fix="write the one that this prints: python -c 'import sys; print(sys.executable)'",
        )
    if not has_torch(found):
        raise UsageError(
            f"{found} has no torch",
            why="the ranks of the script are started with it, because of --python",
            fix=f"install it there: {found} -m pip install torch; or leave --python out",
        )
    # Not resolved: an environment's python is a link, and its packages are found by the link's place.
    return str(Path(found).absolute())


def active_environment(env: Mapping[str, str]) -> Path | None:
    """The environment that the user activated, unless shoal itself runs from it. conda's `base` is always active."""
    conda = "" if env.get("CONDA_DEFAULT_ENV") == "base" else env.get("CONDA_PREFIX", "")
    name = env.get("VIRTUAL_ENV") or conda
    if not name or not os.access(Path(name) / "bin" / "python", os.X_OK):
        return None
    return None if os.path.realpath(name) == os.path.realpath(sys.prefix) else Path(name)


def has_torch(python: str) -> bool:
    try:
        # Not here: a folder or file named torch in the current one is no torch.
        done = subprocess.run(
            [python, "-c", _HAS_TORCH], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_PYTHON_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{python} cannot be run: {error}", why="the ranks of the script are started with it", fix="--python PYTHON"
        ) from None
    return done.returncode == 0


class Source(Enum):
    """What rank 0 reads as its standard input."""

    NONE = "nothing"
    # A pipe or a file is handed to it.
    OURS = "our standard input"
    # Its lines are passed on, since the rank is in another session: the kernel would not keep it from reading what is
    # typed for the shell.
    TERMINAL = "the terminal"


def choose_stdin(on: str, detach: bool, fd: int = 0) -> tuple[Source, str]:
    """Whether rank 0 gets our standard input, as it would under torchrun, and a note where it cannot have it."""
    try:
        kind = os.fstat(fd).st_mode
    except OSError:
        return Source.NONE, ""
    if detach or not isinstance(parse_on(on), LocalSpec):
        why = "the run is detached" if detach else "only rank 0 of local:N can read it"
        note = f"what is piped into shoal run is not passed on: {why}. Let the script read a file"
        return Source.NONE, note if _has_waiting_input(fd, kind) else ""
    if os.isatty(fd):
        return Source.TERMINAL if is_in_foreground(fd) else Source.NONE, ""
    return Source.NONE if stat.S_ISCHR(kind) else Source.OURS, ""


def is_in_foreground(terminal: int) -> bool:
    """Whether what is typed there is for us: not in the background of a shell, nor on another session's terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False


@contextlib.contextmanager
def relay_terminal(fd: int = 0) -> Iterator[int]:
    """A pipe's end from which lines can be read that are typed while this process is in the foreground. The caller
    closes it once the reader has it."""
    reading, writing = os.pipe()
    over = threading.Event()
    thread = threading.Thread(target=_relay, args=(fd, writing, over), name="terminal", daemon=True)
    thread.start()
    try:
        yield reading
    finally:
        over.set()
        thread.join(_CLOSE_S)


def _relay(terminal: int, writing: int, over: threading.Event) -> None:
    """Looks before it reads: a background process that reads its terminal is stopped by the kernel."""
    with contextlib.suppress(OSError):
        while not over.is_set():
            ready, _, _ = select.select((terminal,), (), (), _LOOK_AT_TERMINAL_S)
            if not ready:
                continue
            if not is_in_foreground(terminal):
                over.wait(_LOOK_AT_TERMINAL_S)
                continue
            if not (typed := os.read(terminal, _MOST_TYPED_BYTES)):
                break
            os.write(writing, typed)
    os.close(writing)


def _has_waiting_input(fd: int, kind: int) -> bool:
    if stat.S_ISREG(kind):
        return os.fstat(fd).st_size > 0
    if not stat.S_ISFIFO(kind):
        return False
    waiting = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    return waiting[0] > 0

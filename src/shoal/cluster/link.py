"""A launcher's connection to the agent it started on a node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shoal.control.process import marks
from shoal.runfolder import RunFolder, check_name

STDIN_FD = "SHOAL_STDIN_FD"


def agent_command(run: Path | str, node: str, python: str = sys.executable) -> tuple[str, ...]:
    """Marked by `env`, not by whoever starts it: on an emulated node a helper stands in between, which is no agent."""
    variables = {**marks(run, "agent"), "SHOAL_NODE": check_name(node)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("env", *words, python, "-P", "-m", "shoal.launch.agent")


class Link(Protocol):
    """Orders go in by `send`; answers come by the agent's journal in the run folder."""

    def send(self, line: bytes) -> None:
        """Does nothing when the agent is gone: its journal, or the lack of it, says so."""
        ...

    def ended(self) -> str | None:
        """How the agent ended, in words; None while it lives."""
        ...

    def is_reachable(self) -> bool:
        """Whether orders would arrive now."""
        ...

    def kill(self) -> None: ...
    def close(self) -> None: ...


class PipeLink:
    """To an agent on this machine or on an emulated node of it, which share our run folder."""

    def __init__(self, argv: Sequence[str], run: Path, node: str, stdin: int | None = None) -> None:
        """In a session of its own and not tied to us: it outlives whoever started it.

        Its own standard input has its orders; `stdin` is handed to it for rank 0 of a script."""
        self._log = RunFolder(run).agent_log(node)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as handed, self._log.open("ab") as output:
            env, fds = dict(os.environ), []
            if stdin is not None:
                # Under another number: the agent's standard input is its own.
                fds.append(os.dup(stdin))
                handed.callback(os.close, fds[0])
                env[STDIN_FD] = str(fds[0])
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=fds,
                env=env,
            )

    def send(self, line: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(line)
                stdin.flush()

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        known = {int(each): each.name for each in signal.Signals}
        how = f"was killed ({known.get(-code, f'signal {-code}')})" if code < 0 else f"ended with exit code {code}"
        return f"its agent {how}" + _last_words(self._log)

    def is_reachable(self) -> bool:
        return self._process.poll() is None

    def ask_to_leave(self) -> None:
        """As the machine itself does before it is switched off."""
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Lets go of it; one that still runs goes on by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            # Not ours to wait for any longer; without this the interpreter warns when it forgets the object.
            self._process.returncode = 0


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""

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

from shoal.control.fork_request import TEMPLATE_FD
from shoal.control.processes import make_marks
from shoal.run_folder import RunFolder, check_name

STDIN_FD = "SHOAL_STDIN_FD"


def agent_command(run: Path | str, node: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command of an agent. `env` sets its marks: on an emulated node the process started here is only a
    helper, and must not have them."""
    variables = {**make_marks(run, "agent"), "SHOAL_NODE": check_name(node)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("env", *words, python, "-P", "-m", "shoal.agent.agent")


class AgentLink(Protocol):
    """`send` carries orders to the agent; its answers are in its journal in the run folder."""

    sends_files: bool = False  # what the run writes there arrives over this link, also after the agent is done

    def send(self, line: bytes) -> None:
        """Send an order; do nothing when the agent has ended, which its journal shows."""
        ...

    def ended(self) -> str | None:
        """Describe how the agent ended; None while it runs."""
        ...

    def is_reachable(self) -> bool:
        """Tell whether an order would arrive now."""
        ...

    def kill(self) -> None: ...
    def close(self) -> None: ...


class PipeLink:
    """A link to an agent on this machine or on an emulated node, which share this run folder."""

    sends_files = False

    def __init__(
        self, argv: Sequence[str], run: Path, node: str, stdin: int | None = None, template: int | None = None
    ) -> None:
        """Start the agent in a session of its own and not tied to this process, which it outlives.

        Its standard input carries its orders; the descriptor `stdin` is passed to it for rank 0 of a script, and
        `template` is its socket to a process from which it has ranks forked.
        """
        self._log = RunFolder(run).agent_log(node)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack, self._log.open("ab") as output:
            env, fds = dict(os.environ), []
            for name, fd in ((STDIN_FD, stdin), (TEMPLATE_FD, template)):
                if fd is not None:
                    # With another number: the agent's standard input is its own.
                    fds.append(os.dup(fd))
                    stack.callback(os.close, fds[-1])
                    env[name] = str(fds[-1])
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
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(line)
                stdin.flush()

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        names = {int(number): number.name for number in signal.Signals}
        how = f"was killed ({names.get(-code, f'signal {-code}')})" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how += f": {lines[-1]}" if lines else ""
        return f"its agent {how}"

    def is_reachable(self) -> bool:
        return self._process.poll() is None

    def ask_to_leave(self) -> None:
        """Ask the agent to leave the run, as a machine does that is shut down."""
        self._process.terminate()

    def send_signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close_orders(self) -> None:
        """Show the agent that its launcher is gone: it continues if it has begun."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """Close the link. An agent that still runs continues."""
        self.close_orders()
        if self._process.poll() is None:
            # Without this the interpreter warns about a running child when it deletes the object.
            self._process.returncode = 0

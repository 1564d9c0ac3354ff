"""Keep the machine awake while it trains, and notice that it is about to be suspended, through systemd and logind.

Without these tools nothing happens: the other agents then notice a suspend by its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.control.membership.settings import SUSPEND_DELAY_S
from shoal.control.processes import tie_to

_BLOCK = ("--what=idle:sleep", "--who=shoal", "--mode=block")
# logind waits up to 5 s for holders of this lock: long enough to send a resignation to the other agents.
_DELAY = ("--what=sleep", "--who=shoal", "--mode=delay", "--why=telling the other machines", "cat")
# Not busctl: only root may monitor with it, while every user may subscribe to a signal.
_LISTEN = ("monitor", "--system", "--dest", "org.freedesktop.login1", "--object-path", "/org/freedesktop/login1")
_SIGNAL = re.compile(r"^/org/freedesktop/login1: org\.freedesktop\.login1\.Manager\.PrepareForSleep \((true|false),\)$")


@contextmanager
def awake(why: str) -> Iterator[None]:
    """Hold a lock against sleep. A child reading a pipe of this process holds it, so it ends with this process."""
    tool = shutil.which("systemd-inhibit")
    if tool is None:
        yield
        return
    command = (tool, *_BLOCK, f"--why={why}", "cat")
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as holder:
        # Without logind it ends at once, and would stay a zombie as long as the run.
        threading.Thread(target=holder.wait, daemon=True).start()
        yield


def read_signal(line: str) -> bool | None:
    """Return whether the machine goes to sleep (true) or has woken; None for any other line."""
    match = _SIGNAL.match(line.strip())
    return None if match is None else match[1] == "true"


async def watch_for_sleep(suspend: Callable[[], None], wake: Callable[[], None]) -> None:
    """Call `suspend` before the machine sleeps and `wake` afterwards, for as long as logind sends signals."""
    tool = shutil.which("gdbus")
    if tool is None:
        return
    lock = _DelayLock()
    listener = await _start(tool, *_LISTEN, stdout=PIPE)
    try:
        # The first lines only report that there is a bus, and logind on it.
        while listener.stdout is not None and (line := await listener.stdout.readline()):
            is_suspending = read_signal(line.decode(errors="replace"))
            if is_suspending:
                suspend()
                await asyncio.sleep(SUSPEND_DELAY_S)
                await lock.release()
            elif is_suspending is False:
                wake()
                await lock.take()
            elif not lock.was_taken:
                await lock.take()
    finally:
        await lock.release()
        await _end(listener)


class _DelayLock:
    """A lock that delays a suspend. A child reading a pipe of this process holds it, so it ends with this process."""

    def __init__(self) -> None:
        self.was_taken = False
        self._holder: Process | None = None

    async def take(self) -> None:
        self.was_taken = True
        tool = shutil.which("systemd-inhibit")
        if tool is not None and self._holder is None:
            self._holder = await _start(tool, *_DELAY, stdin=PIPE)

    async def release(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None and holder.stdin is not None:
            holder.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUSPEND_DELAY_S):
                    await holder.wait()
            await _end(holder)


async def _start(*command: str, stdin: int = DEVNULL, stdout: int = DEVNULL) -> Process:
    """Start a child that ends with this process, in a session of its own so that Ctrl-C does not reach it."""
    return await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=stdout, stderr=DEVNULL, preexec_fn=tie_to(os.getpid()), start_new_session=True
    )


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()

"""Keeps the machine from going to sleep while it trains, where systemd is there to be asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.control.processes import tie_to

_WORDS = ("--what=idle:sleep", "--who=shoal", "--mode=block")


@contextmanager
def awake(why: str) -> Iterator[None]:
    """The lock is held by a child that reads our pipe: it ends when we do, however that happens."""
    tool = shutil.which("systemd-inhibit")
    if tool is None:
        yield
        return
    words = (tool, *_WORDS, f"--why={why}", "cat")
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True):
        yield


# SECTION launch/suspend
# Hears from logind that the machine is about to be suspended, so that the others need not find out by its silence.
#
# Without logind, or without the tool that listens to it, nothing is heard, and silence has to do.


# Not busctl: to monitor with it is root's alone, while anybody may subscribe to a signal.
_LISTEN = ("monitor", "--system", "--dest", "org.freedesktop.login1", "--object-path", "/org/freedesktop/login1")
_SIGNAL = re.compile(r"^/org/freedesktop/login1: org\.freedesktop\.login1\.Manager\.PrepareForSleep \((true|false),\)$")
# logind waits for holders of such a lock, 5 s at most: long enough for a word to the others.
_DELAY = ("--what=sleep", "--who=shoal", "--mode=delay", "--why=telling the other machines", "cat")
_GOODBYE_S = 0.3


def read_signal(line: str) -> bool | None:
    """Whether the machine goes to sleep (true) or has woken; None for any other line."""
    found = _SIGNAL.match(line.strip())
    return None if found is None else found[1] == "true"


async def watch_for_sleep(fall_asleep: Callable[[], None], wake: Callable[[], None]) -> None:
    """For as long as there is somebody to listen to."""
    tool = shutil.which("gdbus")
    if tool is None:
        return
    lock = _DelayLock()
    listener = await _start(tool, *_LISTEN, stdout=PIPE)
    try:
        # The first lines only say that there is a bus, and logind on it.
        while listener.stdout is not None and (line := await listener.stdout.readline()):
            sleeps = read_signal(line.decode(errors="replace"))
            if sleeps:
                fall_asleep()
                await asyncio.sleep(_GOODBYE_S)
                await lock.release()
            elif sleeps is False:
                wake()
                await lock.take()
            elif not lock.was_taken:
                await lock.take()
    finally:
        await lock.release()
        await _end(listener)


class _DelayLock:
    """Held by a child that reads our pipe: it ends when we do, however that happens."""

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
                async with asyncio.timeout(_GOODBYE_S):
                    await holder.wait()
            await _end(holder)


async def _start(*words: str, stdin: int = DEVNULL, stdout: int = DEVNULL) -> Process:
    """Gone with us; out of reach of a Ctrl-C that is meant for us."""
    return await asyncio.create_subprocess_exec(
        *words, stdin=stdin, stdout=stdout, stderr=DEVNULL, preexec_fn=tie_to(os.getpid()), start_new_session=True
    )


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()

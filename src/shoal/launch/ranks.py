"""The processes an agent has started: their output in files, their ends noticed, none of them left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.node import start_process
from shoal.control.private import torch_caches
from shoal.launch.orders import Start
from shoal.runfolder import RunFolder


@dataclass(frozen=True)
class Ended:
    """`by_us`: we killed it. `starved`: the kernel killed some process for lack of memory while this one ran."""

    start: Start
    code: int
    by_us: bool
    starved: bool


@dataclass
class _Running:
    start: Start
    process: subprocess.Popen[bytes]
    clock: LogClock
    starved_before: int
    by_us: bool = False


class Ranks:
    def __init__(self, run: RunFolder, node: str, now: Callable[[], float]) -> None:
        self._run = run
        self._node = node
        self._now = now
        self._running: list[_Running] = []

    def start(
        self, start: Start, env: Mapping[str, str], pass_fds: Sequence[int] = (), stdin: int | None = None
    ) -> int:
        log = self._run.log(self._node, start.name)
        # Both before it runs: it may have printed or starved by the time we look.
        clock, starved_before = LogClock(log, self._now), kills_for_memory()
        # The one place that every rank of every launcher passes, on its own machine.
        process = start_process(start.argv, {**start.env, **env, **torch_caches().variables}, log, pass_fds, stdin)
        self._running.append(_Running(start, process, clock, starved_before))
        return process.pid

    def alive(self) -> dict[str, int]:
        return {running.start.name: running.process.pid for running in self._running}

    def reap(self) -> Iterator[Ended]:
        """Those that ended since the last look. The others' logs get their time notes on the way."""
        for running in list(self._running):
            code = running.process.poll()
            running.clock.note()
            if code is not None:
                self._running.remove(running)
                # What it started itself and did not wait for goes with it.
                _kill_session(running.process.pid)
                starved = code == -signal.SIGKILL and kills_for_memory() > running.starved_before
                yield Ended(running.start, code, running.by_us, starved)

    def ask_to_stop(self) -> None:
        for running in self._running:
            running.process.send_signal(signal.SIGINT)

    def end(self, name: str) -> None:
        """This one, as a fault would: what becomes of it is judged like any other loss."""
        for running in self._running:
            if running.start.name == name:
                _kill_session(running.process.pid)

    def kill(self) -> None:
        """The whole session of each, so that a launcher's own children go too."""
        for running in self._running:
            running.by_us = True
            _kill_session(running.process.pid)


class LogClock:
    """Notes beside a log when it grew to which size, so that the logs of several ranks can be read in one order."""

    def __init__(self, log: Path, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._notes = times_of(log)
        self._size = log.stat().st_size if log.exists() else 0

    def note(self) -> None:
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size
            if size != self._size:
                self._size = size
                with self._notes.open("a", encoding="ascii") as file:
                    file.write(f"{self._now():.3f} {size}\n")


def times_of(log: Path) -> Path:
    return log.with_suffix(".times")


def kills_for_memory() -> int:
    """How often the kernel has ended a process for lack of memory since it booted."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)

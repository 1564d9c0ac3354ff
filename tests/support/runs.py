"""Runs in tests: supervisors, agents and ranks are not children of the test, so they are found by their marks."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.control.processes import RunProcess, find_processes
from shoal.runs.manage import end_processes
from tests.support.programs import shoal_command
from tests.support.waiting import wait_until


def parts_of(run: Path) -> dict[str, RunProcess]:
    """Return the processes of a run by their part; of a rank and its children, the rank."""
    return {process.part: process for process in reversed(find_processes(run))}


@contextlib.contextmanager
def ended_afterwards(*runs: Path) -> Iterator[None]:
    """End the remaining processes of these runs. The test itself checks whether any should remain."""
    try:
        yield
    finally:
        end_processes([process for run in runs for process in find_processes(run)])


class Front:
    """A shoal command that runs beside the test; its output is written to files."""

    def __init__(self, folder: Path, *words: str | Path) -> None:
        self._paths = tuple(folder / f"{words[0]}-{time.monotonic_ns()}.{stream}" for stream in ("out", "err"))
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(shoal_command(*words), stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    def await_words(self, words: str, within_s: float = 60.0) -> None:
        wait_until(lambda: words in self.out + self.err, within_s, why=lambda: self.out + self.err)

    def code(self, within_s: float = 60.0) -> int:
        return self.process.wait(within_s)


@contextlib.contextmanager
def front(folder: Path, *words: str | Path) -> Iterator[Front]:
    started = Front(folder, *words)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files: the kernel writes up to the limit and refuses the rest, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

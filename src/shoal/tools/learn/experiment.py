"""What a lesson's `check.py` works with: it runs commands through an `Experiment` and returns a `Result`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from shoal.errors import RunFailed
from shoal.events import Event
from shoal.host.facts import this_machine_is_cpu_only
from shoal.host.node_stats import NodeCounters, usable_cpus
from shoal.host.topology import cores_for_rank, this_topology
from shoal.records.summary import RunSummary, summarize
from shoal.run_folder import RunFolder
from shoal.units import DISTURBING_CORES, pluralize

# Of a prediction, and of what theory and measurement say about it.
Value: TypeAlias = float | str
# Shows that a command runs: called with the command, it gives a function for the last line of its output.
Display: TypeAlias = Callable[[str], AbstractContextManager[Callable[[str], None]]]

# A lesson takes at most three minutes, so a command that takes longer hangs.
_TIMEOUT_S = 300.0
_CLEAN_UP_S = 15.0
_POLL_S = 0.1
# They end a lesson as Ctrl-C does.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOAD_S = 0.5


@dataclass(frozen=True)
class FinishedCommand:
    """A command that has ended."""

    command: str  # as a user types it
    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        """Return what it printed with --json."""
        try:
            return json.loads(self.out)
        except ValueError:
            raise RunFailed(f"{self.command} printed no JSON", why=_last_lines(self.out or self.err)) from None


class TrainedRun:
    """A run folder that a command of the experiment has made."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest  # as `shoal train --json` printed it

    def events(self, kind: str, rank: int = 0) -> list[Event]:
        """Return the events of a rank, such as its steps."""
        return [event for event in self._events if event["event"] == kind and event.get("rank") == rank]

    @cached_property
    def summary(self) -> RunSummary:
        return summarize(self._events)

    @cached_property
    def _events(self) -> list[Event]:
        return list(RunFolder.open(self.path).read_all_events())


@dataclass(frozen=True)
class Check:
    """A condition that the experiment must meet, besides the predictions."""

    text: str  # what must hold, as a sentence
    is_met: bool
    seen: str = ""  # what was measured
    is_timing: bool = False  # whether other programs on the machine change it


@dataclass(frozen=True)
class Bars:
    """A picture: a bar for each name, in one or more series."""

    title: str
    unit: str
    names: Sequence[str]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Lines:
    """A picture: curves over x."""

    title: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Result:
    """What `run` of a check returns. Keys of `theory` and `measured` are the names of the questions."""

    theory: Mapping[str, Value]
    # Without a key there is nothing to measure, and theory judges; None is a measurement that failed.
    measured: Mapping[str, Value | None] = field(default_factory=dict)
    checks: Sequence[Check] = ()
    figures: Mapping[str, Value] = field(default_factory=dict)  # for `{name}` in the explanation
    picture: Bars | Lines | None = None  # by default bars of prediction, theory and measurement


class Experiment:
    """Runs the commands of a lesson in a folder of this try, visibly, and stops at the first that fails."""

    def __init__(
        self,
        folder: Path,
        files: Path,
        answers: Mapping[str, Value],
        display: Display,
        *,
        is_quick: bool = False,
        takes_theory: bool = False,
    ) -> None:
        self.folder = folder  # of this try: commands run in it
        self.files = files  # of the lesson: what the learner writes, kept from try to try
        self.answers = answers  # the predictions, by name of the question; empty with --yes
        self.is_quick = is_quick  # for CI: as few steps as possible; times are not judged
        self.takes_theory = takes_theory  # --yes
        self.commands: list[FinishedCommand] = []
        # Of other programs, while the experiment ran: the most that was seen.
        self.other_cores = 0.0
        self._display = display
        # Lessons are about processors: a rank alone would take the GPU, and two ranks would not share it.
        self._variables = {} if this_machine_is_cpu_only() else {"CUDA_VISIBLE_DEVICES": ""}
        self._at_end = contextlib.ExitStack()

    def __enter__(self) -> Experiment:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note_load(busy_cores())
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave half of a lab.
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in END_SIGNALS}
        try:
            self._at_end.close()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def steps(self, full: int, quick: int) -> str:
        """Return how many steps a training has, as a word of a command."""
        return str(quick if self.is_quick else full)

    def shoal(self, *words: str | Path, codes: Sequence[int] = (0,), cores: int | None = None) -> FinishedCommand:
        """Run `shoal WORDS` to its end, on all cores or on this many. Another exit code than these ends the lesson."""
        pinned = cores_for_rank(this_topology(), 0, 1, cores) if cores and cores < this_topology().usable else None
        prefix = ["taskset", "--cpu-list", ",".join(map(str, pinned))] if pinned else []
        shown = shlex.join([*prefix, "shoal", *map(str, words)])
        return self._run(shown, [*prefix, sys.executable, "-P", "-m", "shoal", *map(str, words)], codes)

    def python(self, *words: str | Path, codes: Sequence[int] = (0,)) -> FinishedCommand:
        """Run `python WORDS` to its end, with the Python that runs shoal."""
        return self._run(shlex.join(["python", *map(str, words)]), [sys.executable, *map(str, words)], codes)

    def train(self, name: str, *words: str | Path) -> TrainedRun:
        """Run `shoal train WORDS --out NAME --json`; note the load of other programs meanwhile."""
        manifest = self.shoal("train", *words, "--out", name, "--json").json()
        return self.read_run(name, manifest)

    def read_run(self, name: str, manifest: Mapping[str, Any] | None = None) -> TrainedRun:
        """Return the run in a folder that any command has made; note the load of other programs meanwhile."""
        run = TrainedRun(self.folder / name, manifest or {})
        if run.path.is_dir():
            self.note_load(run.summary.other_load)
        return run

    def at_end(self, *words: str) -> None:
        """Run `shoal WORDS` when the experiment has ended, also if it fails: to remove a lab."""
        self._at_end.callback(self._clean_up, words)

    def _clean_up(self, words: Sequence[str]) -> None:
        try:
            self.shoal(*words, codes=range(256))
        except OSError:
            # The terminal was closed, so that nothing can be shown.
            self._display = lambda _: contextlib.nullcontext(lambda _: None)
            self.shoal(*words, codes=range(256))

    def note_load(self, cores: float | None) -> None:
        """Note how many cores other programs kept busy during a measurement."""
        self.other_cores = max(self.other_cores, cores or 0.0)

    @property
    def is_disturbed(self) -> bool:
        """Whether times mean nothing. Of many cores more may be busy: 16 idle ones were measured as 0.3 busy."""
        return self.other_cores >= max(DISTURBING_CORES, this_topology().usable / 20)

    def wait_until(self, what: str, is_true: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Wait for a condition, for lessons that act while a run in the background trains; return the seconds."""
        began = time.monotonic()
        while not is_true():
            if time.monotonic() - began > timeout_s:
                raise RunFailed(f"{what}: not within {timeout_s:.0f} s", why=f"the run's files are in {self.folder}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def _run(self, shown: str, words: Sequence[str], codes: Sequence[int]) -> FinishedCommand:
        shown = " ".join([*(f"{name}={value}" for name, value in self._variables.items()), shown])
        with self._display(shown) as update:
            done = self.execute(shown, words, update)
        self.commands.append(done)
        if done.code not in codes:
            raise RunFailed(
                f"{shown} ended with exit code {done.code}",
                why=_last_lines(done.err or done.out),
                fix=f"run it by itself: (cd {shlex.quote(str(self.folder))} && {shown})",
            )
        return done

    def execute(self, shown: str, words: Sequence[str], update: Callable[[str], None]) -> FinishedCommand:
        """Run a program; its output is kept in `commands/` of the folder. Tests replace this by recorded output."""
        logs = self.folder / "commands"
        logs.mkdir(exist_ok=True)
        number = len(list(logs.glob("*.out"))) + 1  # an interrupted command is not in `commands`
        out, err = (logs / f"{number:02}.{name}" for name in ("out", "err"))
        began = time.monotonic()
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**os.environ, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                process_group=0,  # so that Ctrl-C at the terminal reaches it once, from here
            )
            try:
                while process.poll() is None:
                    if time.monotonic() - began > _TIMEOUT_S:
                        raise self._too_slow(shown, err)
                    update(_last_lines(_read(err), 1))
                    time.sleep(_POLL_S)
            finally:
                _end(process)
        return FinishedCommand(shown, process.returncode, _read(out), _read(err), time.monotonic() - began)

    def _too_slow(self, shown: str, err: Path) -> RunFailed:
        load, cpus = os.getloadavg()[1], len(usable_cpus()[1])
        is_busy = load > 2 * cpus
        return RunFailed(
            f"{shown} did not end within {_TIMEOUT_S:.0f} s",
            why=f"{load:.0f} threads want this machine's {pluralize(cpus, 'core')}: it is too busy for a lesson"
            if is_busy
            else f"it hangs, or the machine is too slow for it; its output: {err}",
            fix="repeat the lesson when the other programs have ended" if is_busy else "",
        )


def busy_cores() -> float:
    """Return how many cores programs keep busy at this moment, when no command of the experiment runs."""
    counters, cpus = NodeCounters(), usable_cpus()[1]
    before = counters.read_busy_s(cpus)
    time.sleep(_LOAD_S)
    return (counters.read_busy_s(cpus) - before) / _LOAD_S


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs as Ctrl-C does, and give it the time to remove what it has made."""
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_S)
    finally:
        process.kill()
        process.wait()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _last_lines(text: str, most: int = 6) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines()[-most:])

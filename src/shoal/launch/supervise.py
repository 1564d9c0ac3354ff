"""Starts the processes of a plan, watches them, and sees to it that none is left.

Ctrl-C once asks every rank to finish its step and save; twice ends them now. When one rank fails the others are given a
moment to notice by themselves, so that their logs say so, and are then ended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shoal.cluster.cluster import Cluster
from shoal.cluster.node import Meeting
from shoal.config.schema import RunConfig
from shoal.errors import Interrupted, RunFailed
from shoal.events import Event, EventTail, LineTail, read_events
from shoal.launch.plan import Command, plan_ranks, plan_script
from shoal.launch.verdict import Ending, caused, failure
from shoal.runfolder import RunFolder

POLL_S = 0.05
GRACE_AFTER_FAILURE_S = 3.0
# A lost terminal (SIGHUP) saves what was done, as Ctrl-C does.
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Watch = Callable[[list[Event]], None]


def run_ranks(config: RunConfig, run: RunFolder, cluster: Cluster, watch: Watch, resume: bool = False) -> None:
    """Runs the world to its end. Raises what went wrong, or `Interrupted`; returns when every rank ended well."""
    tails = [EventTail(run.events(rank)) for rank in range(sum(node.slots for node in cluster.nodes))]
    for tail in tails:
        tail.skip_to_end()
    began = time.time()
    world = _World(run, cluster)
    with world, _signals(world):
        with cluster.bind(cluster.nodes[0]) as meeting:
            world.start(plan_ranks(config, run.path, cluster.nodes, meeting, resume), meeting)
        world.see_through(lambda: watch([event for tail in tails for event in tail.poll()]))
    faults = _faults(run, began)
    error = failure(world.endings, faults, _log_tails(world, run))
    if world.interrupts and not (world.interrupts == 1 and caused(faults)):
        raise _interrupted(run, at_once=world.interrupts > 1)
    if error:
        raise error
    if any(ending.code == Interrupted.exit_code for ending in world.endings):
        # Somebody asked a rank itself, and all agreed to stop.
        raise _interrupted(run, at_once=False)


def run_script(
    config: RunConfig, argv: Sequence[str], run: RunFolder, cluster: Cluster, show: Callable[[str, str], None]
) -> None:
    """Runs anybody's script on every slot; `show` gets each line with the name of the rank that printed it.

    The error that is raised carries the script's own exit code: that of the first rank to fail.
    """
    world = _World(run, cluster)
    with world, _signals(world):
        with cluster.bind(cluster.nodes[0]) as meeting:
            commands = plan_script(config, argv, cluster.nodes, meeting)
        world.start(commands, meeting)
        tails = {command.name: LineTail(run.log(command.node.name, command.name)) for command in commands}

        def show_lines() -> None:
            for name, tail in tails.items():
                for line in tail.poll():
                    show(name, line)

        world.see_through(show_lines)
        for name, tail in tails.items():
            if words := tail.last_words():
                show(name, words)
    if world.interrupts:
        raise Interrupted("interrupted", fix=f"what the ranks printed is in {run.path / 'logs'}")
    if error := failure(world.endings, {}, {}):
        first = min((ending for ending in world.endings if ending.code != 0), key=lambda ending: ending.order)
        error.exit_code = first.code if first.code > 0 else 128 - first.code
        raise error


def _interrupted(run: RunFolder, at_once: bool) -> Interrupted:
    if not run.checkpoints.is_dir():
        return Interrupted("interrupted before the first checkpoint", fix="start anew with another --out")
    how = "ended at once" if at_once else "saved what was done"
    return Interrupted(
        f"interrupted: {how}", fix=f"go on from the last checkpoint: shoal train --resume {shlex.quote(str(run.path))}"
    )


@dataclass
class _World:
    """The processes of one run. Leaving the `with` block leaves none of them."""

    run: RunFolder
    cluster: Cluster
    commands: list[Command] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    interrupts: int = 0
    _failed_at: float | None = None
    _asked_to_stop: bool = False

    def start(self, commands: list[Command], meeting: Meeting) -> None:
        """While the meeting's socket is still open for rank 0 to inherit."""
        self.commands = commands
        try:
            for command in commands:
                fds = (meeting.fd,) if command.serves_store else ()
                log = self.run.log(command.node.name, command.name)
                self.processes[command.name] = self.cluster.start(command.node, command.argv, command.env, log, fds)
        except OSError as error:
            raise RunFailed(
                f"cannot start {command.name} on {command.node.name}: {error.strerror}",
                why="the machine is out of processes or memory, or the run folder is not writable",
                fix="check: ulimit -u; df -h",
            ) from error

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()

    def see_through(self, look: Callable[[], None]) -> None:
        """Until the last process has ended, looking now and then, and once more when all is said."""
        while self.running():
            look()
            time.sleep(POLL_S)
        look()

    def running(self) -> bool:
        self._obey()
        for command in self.commands:
            self._reap(command)
        if self._failed_at is not None and time.monotonic() - self._failed_at > GRACE_AFTER_FAILURE_S:
            self._kill_all()
        return len(self.endings) < len(self.commands)

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Only counted here: a handler that waited for a process would hang where it interrupts `poll`, which locks."""
        self.interrupts += 1

    def _obey(self) -> None:
        if self.interrupts > 1:
            self._kill_all()
        elif self.interrupts and not self._asked_to_stop:
            self._asked_to_stop = True
            for process in self.processes.values():
                process.send_signal(signal.SIGINT)

    def _reap(self, command: Command, by_us: bool = False) -> None:
        code = self.processes[command.name].poll()
        if code is None or any(ending.name == command.name for ending in self.endings):
            return
        log = str(self.run.log(command.node.name, command.name))
        self.endings.append(Ending(command.name, command.node.name, command.ranks, code, len(self.endings), by_us, log))
        if code not in (0, Interrupted.exit_code) and self._failed_at is None:
            self._failed_at = time.monotonic()

    def _kill_all(self) -> None:
        """The whole session of each process, so a launcher's own children go too."""
        for command in self.commands:
            process = self.processes.get(command.name)
            if process is None or process.poll() is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._reap(command, by_us=True)


@contextlib.contextmanager
def _signals(world: _World) -> Iterator[None]:
    before = {signum: signal.signal(signum, world.interrupt) for signum in _STOP}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _faults(run: RunFolder, since: float) -> dict[int, Event]:
    """The first fault each rank wrote in this launch; a resumed run's older ones are history."""
    faults: dict[int, Event] = {}
    for rank, path in run.event_files().items():
        for event in read_events(path):
            if event.get("event") == "fault" and event.get("time", 0) >= since:
                faults.setdefault(rank, event)
    return faults


def _log_tails(world: _World, run: RunFolder) -> dict[str, str]:
    return {command.name: tail_of(run.log(command.node.name, command.name)) for command in world.commands}


def tail_of(log: Path, lines: int = 12, most_bytes: int = 8192) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""

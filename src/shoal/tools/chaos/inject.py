"""Carry out the actions of a scenario on a cluster and its run.

Every action is prepared first: the recorded moment is when it happened, not when the search for a process began.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from shoal.cluster.lab import LabNode
from shoal.control.processes import AGENT, RunProcess, find_processes, find_supervisor
from shoal.errors import LabError
from shoal.events import EventLog
from shoal.records.run_tails import RunTails
from shoal.run_folder import RunFolder
from shoal.runs.manage import stop_run
from shoal.runs.start import resume_script, resume_training
from shoal.runs.supervisor import is_script
from shoal.tools.chaos import actions, damage
from shoal.tools.chaos.actions import Action, describe
from shoal.tools.chaos.scenario import CommandResult
from shoal.tools.chaos.testbed import TestBed

Injectable = Callable[[], object]
_COMMAND_TIMEOUT_S = 120.0
# The kernel merges two pending signals of one kind: wait before the second.
_BETWEEN_SIGNALS_S = 0.3
_POLL_S = 0.01
_FIND_EVERY_S = 1.0


class NoDisplay:
    """A display that shows nothing: `shoal chaos` shows the progress itself."""

    def __init__(self, config: object) -> None: ...
    def __call__(self, events: object) -> None: ...
    def close(self) -> None: ...


class NoLines:
    """The same for the lines of a user's script."""

    is_live = False

    def lines(self, lines: object, current: object = ()) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Injector:
    """Carry out actions on a run and record them in its folder."""

    def __init__(self, name: str, run: RunFolder, testbed: TestBed, draw: random.Random) -> None:
        self._name, self._run, self._testbed, self._draw = name, run, testbed, draw
        self._log: EventLog | None = None
        self._last_at = 0.0
        self.answers: list[CommandResult] = []
        self.joined: list[subprocess.Popen[bytes]] = []

    def inject(self, action: Action) -> dict[str, object]:
        """Carry out the action; return the event that is also written to the run folder."""
        carry_out = self._prepare(action)
        fields = {"scenario": self._name, "fault": describe(action), **action.model_dump(exclude_none=True)}
        at = self._last_at = round(time.time(), 6)
        carry_out()
        event = {"event": "injected", "time": at, "done": round(time.time(), 6), **fields}
        self._write(event)
        return event

    def close(self) -> None:
        for process in self.joined:
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def _write(self, event: dict[str, object]) -> None:
        """Write an event. The log is opened with the first one: a scenario without a training has no folder."""
        if self._log is None and self._run.path.is_dir():
            self._log = EventLog(self._run.chaos, 0)
        if self._log is not None:
            self._log.append(event)

    def _prepare(self, action: Action) -> Injectable:
        """Find what the action needs; return the function that carries it out at once."""
        path, lab = self._run.path, self._testbed.lab
        match action:
            case actions.KillRank(rank=rank, node=node, signal=name):
                return self._signal(_rank_of(path, rank, node), f"SIG{name}")
            case actions.KillSourceInCopy(within_s=within_s):
                return self._signal(self._source_in_copy(within_s), "SIGKILL")
            case actions.KillNode(node=node, silent=silent):
                return partial(self._node(node).kill, silent=True) if silent else self._kill_processes(node)
            case actions.KillRun():
                return self._kill_run()
            case actions.KillAgent(node=node):
                return self._signal(_agent_of(path, node), "SIGKILL")
            case actions.FreezeRank(rank=rank):
                return self._signal(_rank_of(path, rank, None), "SIGSTOP")
            case actions.ThawRank(rank=rank):
                return self._signal(_rank_of(path, rank, None), "SIGCONT")
            case actions.SignalSupervisor(signal=name, twice=twice):
                return self._signal(_need(find_supervisor(path), "the supervisor"), f"SIG{name}", 1 + twice)
            case actions.LimitMemory(rank=rank):
                pid = _rank_of(path, rank, None).pid
                return lambda: limit_memory(pid)
            case actions.CorruptMemory(rank=rank, how=how):
                pid = _rank_of(path, rank, None).pid
                return damage.prepare_memory_damage(pid, self._run.checkpoints, how, self._draw)
            case actions.FillDisk():
                return lambda: damage.fill(self._disk())
            case actions.FreeDisk():
                return lambda: damage.free(self._disk())
            case actions.CutPower():
                return self._cut_power()
            case actions.CorruptCheckpoint(how=file_damage):
                return lambda: damage.corrupt_newest(self._run.checkpoints, file_damage, self._draw)
            case actions.StopRun():
                return lambda: stop_run(self._run)
            case actions.Resume():
                return partial(_resume, path)
            case actions.UnknownConnections(connections=connections, idle=idle):
                return damage.prepare_connections(path, lab, connections, idle)
            case actions.RunShoal(words=words):
                return lambda: self.answers.append(self._run_shoal(words))
            case actions.PowerOn(node=node):
                return partial(self._power_on, node)
            case actions.Freeze(node=node):
                return self._node(node).freeze
            case actions.Thaw(node=node):
                return self._node(node).thaw
            case actions.Cut(between=between, one_way=one_way):
                other = between[1] if len(between) > 1 else None
                return partial(self._node(between[0]).cut, other, one_way)
            case actions.Heal():
                return self._testbed.need_lab().heal
            case actions.SetLink(node=node, rate=rate):
                return partial(self._node(node).set_link, rate=rate)
            case actions.Loss(node=node, percent=percent):
                return partial(self._node(node).set_link, loss=f"{percent:f}%")
            case actions.LimitCpu(node=node, share=share):
                return partial(self._node(node).set_cpu, share)
        raise AssertionError(f"no case for {describe(action)}")

    def _node(self, name: str) -> LabNode:
        return self._testbed.need_lab().node(name)

    def _source_in_copy(self, within_s: float) -> RunProcess:
        """Return the sending rank once a receiving one has recorded that a copy begins.

        Finding processes takes a while, so it is done before.
        """
        tails = RunTails(self._run, "rank")
        deadline = time.monotonic() + within_s
        ranks: list[RunProcess] = []
        found_at = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() - found_at > _FIND_EVERY_S:
                ranks, found_at = find_processes(self._run.path), time.monotonic()
            for _, events in tails.poll():
                for event in events:
                    if event.get("event") == "copy" and float(event["time"]) > self._last_at:
                        part = f"rank-{event['source']}"
                        return _oldest([process for process in ranks if process.part == part], part)
            time.sleep(_POLL_S)
        raise LabError(f"no copy began within {within_s:g} s", why="no rank rejoined, or none was behind")

    def _signal(self, process: RunProcess, name: str, times: int = 1) -> Injectable:
        def send() -> None:
            for number in range(times):
                time.sleep(_BETWEEN_SIGNALS_S if number else 0.0)
                os.kill(process.pid, signal.Signals[name])

        return send

    def _kill_processes(self, node: str) -> Injectable:
        """Kill all processes but keep the node: its kernel closes their connections, as a real one does.

        If the node went with them, these packets would sometimes be lost, and it would be a power cut.
        """
        lab = self._testbed.need_lab()
        victims = [pid for pid, _ in lab.processes(node)]
        if not victims:
            raise LabError(f"no process runs on {node}", why="an earlier fault ended it, or the run is over")

        def kill() -> None:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return kill

    def _kill_run(self) -> Injectable:
        """Kill until no process is left: an agent may have started a rank meanwhile."""
        victims = find_processes(self._run.path)
        _need(victims[0] if victims else None, "the run")

        def kill() -> None:
            left = victims
            while left:
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                left = find_processes(self._run.path)

        return kill

    def _cut_power(self) -> Injectable:
        kill = self._kill_run()

        def cut() -> None:
            kill()
            if self._log is not None:
                # The log is on that disk, too.
                self._log.close()
                self._log = None
            self._testbed.cut_power()

        return cut

    def _disk(self) -> Path:
        if self._testbed.disk is None:
            raise LabError("there is no disk to fill", fix="set its size: disk_mb = 4")
        return self._testbed.disk

    def _power_on(self, node: str) -> None:
        lab = self._testbed.need_lab()
        if not lab.is_alive(node):
            lab.node(node).restart()
        words = (sys.executable, "-P", "-m", "shoal", "join", str(self._run.path), "--node", node)
        log = self._run.log(node, "join")
        self.joined.append(lab.start(node, words, {}, log))

    def _run_shoal(self, words: tuple[str, ...]) -> CommandResult:
        arguments = [word.format(on=self._testbed.on, run=self._run.path) for word in words]
        began = time.monotonic()
        argv = [sys.executable, "-P", "-m", "shoal", *arguments]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LabError(f"shoal {' '.join(arguments)} did not end within {_COMMAND_TIMEOUT_S:.0f} s") from None
        return CommandResult(done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def _resume(run: Path) -> None:
    if is_script(RunFolder(run)):
        resume_script(run, {}, detach=True, display=NoLines())
    else:
        resume_training(run, NoDisplay, detach=True)


def limit_memory(pid: int) -> None:
    """Let the process have no more memory than it has now."""
    limit = int(psutil.Process(pid).memory_info().vms)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _rank_of(run: Path, rank: int | None, node: str | None) -> RunProcess:
    """Return the rank by its number, or the first one of a node."""
    ranks = [process for process in find_processes(run) if process.part.startswith("rank-")]
    if node is None:
        return _oldest([process for process in ranks if process.part == f"rank-{rank}"], f"rank {rank}")
    return _oldest([process for process in ranks if process.node == node], node)


def _oldest(processes: list[RunProcess], name: str) -> RunProcess:
    """Return the rank itself: processes that it started are younger."""
    return _need(min(processes, key=lambda process: process.started_at, default=None), name)


def _agent_of(run: Path, node: str) -> RunProcess:
    agents = (process for process in find_processes(run) if process.part == AGENT and process.node == node)
    return _need(next(agents, None), f"the agent of {node}")


def _need(process: RunProcess | None, name: str) -> RunProcess:
    if process is None:
        raise LabError(f"{name} is not running", why="an earlier fault ended it, or the run is over")
    return process

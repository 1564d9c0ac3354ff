"""Does to a cluster and its run what a scenario says.

Every action is prepared first, so that the moment that is written down is when it happened, and not when we began to
look for a process.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.cluster.lab import changes
from shoal.cluster.lab.changes import Change
from shoal.cluster.lab.spec import Link
from shoal.errors import LabError
from shoal.events import EventLog, EventTail
from shoal.launch.found import AGENT, Found, find, find_keeper
from shoal.runfolder import RunFolder
from shoal.trials.chaos import actions
from shoal.trials.chaos.actions import Action, describe
from shoal.trials.chaos.disks import corrupt_newest, fill, free
from shoal.trials.chaos.ground import Ground
from shoal.trials.chaos.memory import aim
from shoal.trials.chaos.record import Answer
from shoal.trials.chaos.strangers import garbage
from shoal.trials.stopping import stop
from shoal.trials.training import train_on
from shoal.units import parse_rate

Deed = Callable[[], object]
_COMMAND_S = 120.0
_AGAIN_S = 0.3
_POLL_S = 0.01
_LOOK_AGAIN_S = 1.0


class Silent:
    """A display that shows nothing: who plays a scenario tells of it in its own words."""

    def __init__(self, config: object) -> None: ...
    def __call__(self, events: object) -> None: ...
    def close(self) -> None: ...


class Injector:
    def __init__(self, name: str, run: RunFolder, ground: Ground, draw: random.Random) -> None:
        self._name, self._run, self._ground, self._draw = name, run, ground, draw
        self._log: EventLog | None = None
        self._last_at = 0.0
        self.answers: list[Answer] = []
        self.joined: list[subprocess.Popen[bytes]] = []

    def inject(self, action: Action) -> dict[str, object]:
        """What was done, and when: the line that the run folder gets, too."""
        deed = self._prepare(action)
        fields = {"scenario": self._name, "fault": describe(action), **action.model_dump(exclude_none=True)}
        at = self._last_at = round(time.time(), 6)
        deed()
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
        """Opened with the first one: a scenario without a training has no folder."""
        if self._log is None and self._run.path.is_dir():
            self._log = EventLog(self._run.chaos, 0)
        if self._log is not None:
            self._log.append(event)

    def _prepare(self, action: Action) -> Deed:
        match action:
            case actions.KillRank(rank=rank, node=node, signal=name):
                return self._signal(_rank_of(self._run.path, rank, node), f"SIG{name}")
            case actions.KillSourceInCopy(within_s=within_s):
                return self._signal(self._source_in_copy(within_s), "SIGKILL")
            case actions.KillNode(node=node, silent=False):
                return self._kill_all(node)
            case actions.KillRun():
                return self._kill_run()
            case actions.KillAgent(node=node):
                return self._signal(_agent_of(self._run.path, node), "SIGKILL")
            case actions.FreezeRank(rank=rank):
                return self._signal(_rank_of(self._run.path, rank, None), "SIGSTOP")
            case actions.ThawRank(rank=rank):
                return self._signal(_rank_of(self._run.path, rank, None), "SIGCONT")
            case actions.SignalKeeper(signal=name, twice=twice):
                return self._signal(_need(find_keeper(self._run.path), "the keeper"), f"SIG{name}", 1 + twice)
            case actions.Starve(rank=rank):
                found = _rank_of(self._run.path, rank, None)
                return lambda: no_more_memory(found.pid)
            case actions.CorruptMemory(rank=rank, how=harm):
                found = _rank_of(self._run.path, rank, None)
                return aim(found.pid, self._run.checkpoints, harm, self._draw)
            case actions.FillDisk():
                return lambda: fill(self._disk())
            case actions.FreeDisk():
                return lambda: free(self._disk())
            case actions.CutPower():
                return self._cut_power()
            case actions.CorruptCheckpoint(how=how):
                return lambda: corrupt_newest(self._run.checkpoints, how, self._draw)
            case actions.Stop():
                return lambda: stop(self._run)
            case actions.Resume():
                return lambda: train_on(self._run.path, Silent, detach=True)
            case actions.Garbage(connections=connections, idle=idle):
                return garbage(self._run.path, self._ground.lab, connections, idle)
            case actions.Command(words=words):
                return lambda: self.answers.append(self._ask(words))
            case actions.PowerOn(node=node):
                return lambda: self._power_on(node)
            case _:
                change = _change(action)
                return lambda: self._ground.need_lab().perform(change)

    def _source_in_copy(self, within_s: float) -> Found:
        """The sending rank, once a receiving one has written that a copy begins. To find processes takes a while, so
        they are looked for before."""
        tails: dict[Path, EventTail] = {}
        deadline = time.monotonic() + within_s
        ranks: list[Found] = []
        looked_at = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() - looked_at > _LOOK_AGAIN_S:
                ranks, looked_at = find(self._run.path), time.monotonic()
            for path in self._run.event_files().values():
                for event in tails.setdefault(path, EventTail(path)).poll():
                    if event.get("event") == "copy" and float(event["time"]) > self._last_at:
                        return _oldest(ranks, f"rank-{event['source']}")
            time.sleep(_POLL_S)
        raise LabError(f"no copy began within {within_s:g} s", why="no rank came back, or none was behind")

    def _signal(self, found: Found, name: str, times: int = 1) -> Deed:
        def deed() -> None:
            for number in range(times):
                # Two at once are one: the kernel keeps no count of them.
                time.sleep(_AGAIN_S if number else 0.0)
                os.kill(found.pid, signal.Signals[name])

        return deed

    def _kill_all(self, node: str) -> Deed:
        """The node itself stands: its kernel still says goodbye for its processes, as a real one does. When it goes
        with them, that is at times lost on the way, and would be a power cut."""
        lab = self._ground.need_lab()
        victims = [pid for pid, _ in lab.processes(node)]
        if not victims:
            raise LabError(f"nothing runs on {node}", why="an earlier fault ended it, or the run is over")

        def deed() -> None:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return deed

    def _kill_run(self) -> Deed:
        """Until nothing of it is found any more: an agent may have started a rank meanwhile."""
        victims = find(self._run.path)
        _need(victims[0] if victims else None, "the run")

        def deed() -> None:
            left = victims
            while left:
                for found in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(found.pid, signal.SIGKILL)
                left = find(self._run.path)

        return deed

    def _cut_power(self) -> Deed:
        kill = self._kill_run()

        def deed() -> None:
            kill()
            if self._log is not None:
                # It lies on the disk, too.
                self._log.close()
                self._log = None
            self._ground.cut_power()

        return deed

    def _disk(self) -> Path:
        if self._ground.disk is None:
            raise LabError("there is no disk to fill", fix="say how large it is: disk_mb = 4")
        return self._ground.disk

    def _power_on(self, node: str) -> None:
        lab = self._ground.need_lab()
        if not lab.is_alive(node):
            lab.perform(changes.restart(node))
        words = (sys.executable, "-P", "-m", "shoal", "join", str(self._run.path), "--node", node)
        log = self._run.log(node, "join")
        self.joined.append(lab.start(node, words, {}, log))

    def _ask(self, words: tuple[str, ...]) -> Answer:
        said = [word.format(on=self._ground.on, run=self._run.path) for word in words]
        began = time.monotonic()
        argv = [sys.executable, "-P", "-m", "shoal", *said]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except subprocess.TimeoutExpired:
            raise LabError(f"shoal {' '.join(said)} gave no answer within {_COMMAND_S:.0f} s") from None
        return Answer(done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def no_more_memory(pid: int) -> None:
    import resource

    import psutil

    limit = int(psutil.Process(pid).memory_info().vms)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _change(action: Action) -> Change:
    match action:
        case actions.KillNode(node=node):
            return changes.kill(node, silent=True)
        case actions.Freeze(node=node):
            return changes.stop_or_go(node, frozen=True)
        case actions.Thaw(node=node):
            return changes.stop_or_go(node, frozen=False)
        case actions.Cut(between=between, one_way=one_way):
            return changes.cut_off(between[0], between[1] if len(between) > 1 else None, one_way)
        case actions.Heal():
            return changes.heal_cuts(None, None)
        case actions.SetLink(node=node, rate=rate):
            rate_bps = parse_rate(rate)
            return changes.set_link(node, lambda link: link.model_copy(update={"rate_bps": rate_bps}))
        case actions.Loss(node=node, percent=percent):
            return changes.set_link(node, lambda link: _lossy(link, percent))
        case actions.Cpu(node=node, share=share):
            return changes.set_cpu(node, share)
    raise AssertionError(f"nobody knows how to {describe(action)}")


def _lossy(link: Link, percent: float) -> Link:
    return link.model_copy(update={"loss": percent / 100})


def _rank_of(run: Path, rank: int | None, node: str | None) -> Found:
    """The rank itself and not a process it started: that is younger."""
    ranks = [found for found in find(run) if found.part.startswith("rank-")]
    wanted = [found for found in ranks if (found.part == f"rank-{rank}" if node is None else found.node == node)]
    return _need(
        min(wanted, key=lambda found: found.started_at, default=None), f"rank {rank}" if node is None else node
    )


def _oldest(ranks: list[Found], part: str) -> Found:
    """The rank itself and not a process it started."""
    wanted = (found for found in ranks if found.part == part)
    return _need(min(wanted, key=lambda found: found.started_at, default=None), part)


def _agent_of(run: Path, node: str) -> Found:
    wanted = (found for found in find(run) if found.part == AGENT and found.node == node)
    return _need(next(wanted, None), f"the agent of {node}")


def _need(found: Found | None, what: str) -> Found:
    if found is None:
        raise LabError(f"{what} is not running", why="an earlier fault ended it, or the run is over")
    return found

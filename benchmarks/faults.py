"""From a fault to the next commit, many times over: each fault is played again and again in one training.

    sudo .venv/bin/python benchmarks/faults.py --rounds 10
    sudo .venv/bin/python benchmarks/faults.py --rounds 10 --fault 1 --fault 3

Emulated nodes and a tiny GPT. After each fault everybody is waited for, so that every round begins with all of them.
Printed are, as median, 95th percentile and worst: the time to the next commit, the time until all train again, and how
long nobody committed while the one that was away came in. Of a fault that is to change nothing: the longest pause, and
how many rounds changed the membership all the same.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _common import options, wait_until
from shoal.cluster.lab import ShoalLab
from shoal.events import EventTail
from shoal.run_folder import RunFolder
from shoal.tools.chaos.actions import Action, Cut, Freeze, Heal, KillAgent, KillNode, KillRank, PowerOn, Thaw
from shoal.tools.chaos.inject import Injector
from shoal.tools.chaos.testbed import TestBed
from shoal_lab.spec import make_spec

TINY = ("model.layers=1", "model.heads=2", "model.width=16", "model.seq_len=16", "data.sentences=400")
_DEADLINE_S = 90.0
_CALM_S = 3.0


@dataclass(frozen=True)
class Fault:
    """What is done, what undoes it, and how long after. `left`: so many nodes train on until then. One that is
    `harmless` must change nobody's membership."""

    title: str
    does: tuple[Action, ...]
    undo: tuple[Action, ...] = ()
    undo_after_s: float = 0.0
    nodes: int = 3
    left: int = 2
    harmless: bool = False


def _freeze(seconds: float, harmless: bool = False) -> Fault:
    does, undo = (Freeze(node="node2"),), (Thaw(node="node2"),)
    return Fault(f"a node frozen for {seconds:g} s", does, undo, seconds, harmless=harmless)


def _away(seconds: float, harmless: bool = False) -> Fault:
    return Fault(f"a link away for {seconds:g} s", (Cut(between=("node2",)),), (Heal(),), seconds, harmless=harmless)


def _kill(*nodes: str) -> Fault:
    title = "every process of a node" if len(nodes) == 1 else "two of three nodes at once"
    does, undo = tuple(KillNode(node=node) for node in nodes), tuple(PowerOn(node=node) for node in nodes)
    return Fault(title, does, undo, 2.0, left=3 - len(nodes))


FAULTS = {
    "1": Fault("kill -9 of a rank", (KillRank(rank=2),)),
    "2": Fault("kill -9 of the leading agent", (KillAgent(node="node1"),), (PowerOn(node="node1"),), 2.0),
    "3": _kill("node3"),
    "3s": Fault("power cut of a node", (KillNode(node="node3", silent=True),), (PowerOn(node="node3"),), 6.0),
    "4": _kill("node2", "node3"),
    "5": _freeze(1.5, harmless=True),
    "6": _freeze(30.0),
    "7": Fault("cut off, two against one, healed", (Cut(between=("node3",)),), (Heal(),), 6.0),
    "7t": Fault("cut off, one against one, healed", (Cut(between=("node2",)),), (Heal(),), 6.0, nodes=2, left=1),
    "9": _away(0.5, harmless=True),
    "9l": _away(5.0),
}


@dataclass(frozen=True)
class Commit:
    time: float
    generation: int
    members: int


@dataclass(frozen=True)
class Round:
    """`next_s` is None where nothing was to change and nothing did; then `pause_s` is the longest of the fault, and
    otherwise that of coming back. `back_s` counts from when the fault was undone."""

    next_s: float | None
    back_s: float
    pause_s: float


class Training:
    def __init__(self, folder: Path, on: str, nodes: int) -> None:
        self.run = RunFolder(folder)
        self._nodes = nodes
        self._tail = EventTail(self.run.commits)
        self._commits: list[Commit] = []
        sets = (*TINY, "members.restarts=1000", "train.steps=10000000", "train.compile=off")
        words = [sys.executable, "-m", "shoal", "train", "--on", on, "--detach", "--out", str(folder)]
        subprocess.run([*words, *(word for each in sets for word in ("--set", each))], check=True, capture_output=True)
        self.await_(lambda: len(self.commits()) > 40, "the first steps")

    def commits(self) -> list[Commit]:
        for record in self._tail.poll():
            if "step" in record:
                number = int(record["generation"].partition("-")[0])
                self._commits.append(Commit(record["time"], number, len(record["members"])))
        return self._commits

    def went_on(self, at: float, members: int) -> Commit | None:
        """The first commit of a generation of so many that began after the fault."""
        before = max(commit.generation for commit in self.commits() if commit.time <= at)
        later = (commit for commit in self.commits() if commit.time > at and commit.generation > before)
        return next((commit for commit in later if commit.members == members), None)

    def has_changed(self, at: float) -> bool:
        return len({commit.generation for commit in self.commits() if commit.time > at - 0.5}) > 1

    def complete_since(self, at: float) -> Commit | None:
        """The first commit after that moment from which on all are there."""
        late = [commit for commit in self.commits() if commit.time > at]
        alone = [number for number, commit in enumerate(late) if commit.members < self._nodes]
        return next(iter(late[alone[-1] + 1 if alone else 0 :]), None)

    def longest_pause(self, since: float, until: float) -> float:
        """Two halves of a run may write one ledger: their lines are not in order."""
        times = sorted(commit.time for commit in self.commits() if since <= commit.time <= until)
        return max(after - before for before, after in pairwise([*times, until]))

    def await_(self, what: Callable[[], object], words: str) -> None:
        wait_until(what, _DEADLINE_S, why=lambda: f"{words}; look at {self.run.path}", every_s=0.05)

    def end(self) -> None:
        subprocess.run([sys.executable, "-m", "shoal", "stop", str(self.run.path)], check=False, capture_output=True)


def play(training: Training, injector: Injector, fault: Fault) -> Round:
    at = _inject(injector, fault.does)
    if not fault.harmless:
        training.await_(lambda: training.went_on(at, fault.left), "the next commit")
    time.sleep(max(0.0, at + fault.undo_after_s - time.time()))
    over = _inject(injector, fault.undo) if fault.undo else at
    went_on = training.went_on(at, fault.left)
    # A rank that was killed comes back by itself: only from when the others went on is it away.
    away_from = over if went_on is None or fault.undo else went_on.time
    training.await_(lambda: training.complete_since(away_from), "everybody")
    complete = training.complete_since(away_from)
    assert complete
    if fault.harmless:
        time.sleep(_CALM_S)
        training.await_(lambda: training.complete_since(time.time() - 0.5), "everybody")
        return Round(
            over - at if training.has_changed(at) else None, 0.0, training.longest_pause(at - 0.5, time.time())
        )
    assert went_on
    pause = training.longest_pause(max(over, went_on.time), complete.time)
    return Round(went_on.time - at, complete.time - over, pause)


def _inject(injector: Injector, actions: Sequence[Action]) -> float:
    """When the last of them was begun."""
    return max([float(str(injector.inject(action)["time"])) for action in actions])


def describe(times: Sequence[float]) -> str:
    p95 = statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    return f"p50 {statistics.median(times):5.2f} s  p95 {p95:5.2f} s  worst {max(times):5.2f} s"


def show(key: str, fault: Fault, rounds: Sequence[Round]) -> None:
    name = f"{key:3} {fault.title:34}"
    went = [each.next_s for each in rounds if each.next_s is not None]
    if fault.harmless:
        print(f"{name} longest pause {describe([each.pause_s for each in rounds])}; changed: {len(went)}", flush=True)
        return
    print(f"{name} next commit   {describe(went)}", flush=True)
    print(f"{'':38} all again     {describe([each.back_s for each in rounds])}", flush=True)
    print(f"{'':38} pause at that {describe([each.pause_s for each in rounds])}", flush=True)


@contextmanager
def trained(nodes: int, draw: random.Random) -> Iterator[tuple[Training, Injector]]:
    with tempfile.TemporaryDirectory() as folder:
        lab = ShoalLab.build(make_spec(nodes, name=f"faults-{os.getpid()}"), owner=os.getpid())
        try:
            training = Training(Path(folder) / "run", f"lab:{lab.name}", nodes)
            injector = Injector("benchmark", training.run, TestBed(f"lab:{lab.name}", lab), draw)
            try:
                yield training, injector
                last = training.commits()[-1]
                print(f"{nodes} nodes: generation {last.generation}, load {os.getloadavg()[0]:.1f}", flush=True)
            finally:
                injector.close()
                training.end()
        finally:
            lab.close()


def main() -> None:
    parser = options(__doc__, rounds_=10, quick={"fault": ["1"]})
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="may be repeated")
    chosen = parser.parse_args()
    keys = chosen.fault or list(FAULTS)
    draw = random.Random(1)
    found: dict[str, list[Round]] = {}
    for nodes in sorted({FAULTS[key].nodes for key in keys}, reverse=True):
        with trained(nodes, draw) as (training, injector):
            for key in (key for key in keys if FAULTS[key].nodes == nodes):
                found[key] = []
                for _ in range(chosen.rounds):
                    time.sleep(1 + draw.random())
                    found[key].append(play(training, injector, FAULTS[key]))
                show(key, FAULTS[key], found[key])
    print(
        json.dumps({key: [each.next_s and round(each.next_s, 3) for each in rounds] for key, rounds in found.items()})
    )


if __name__ == "__main__":
    main()

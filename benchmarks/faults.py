"""From a fault to the next commit, many times over: each fault is played again and again in one training.

    sudo .venv/bin/python benchmarks/faults.py --rounds 10

Three emulated nodes and a tiny GPT. After each fault everybody is waited for, so that every round begins with all of
them. Printed are the median, the 95th percentile and the worst; and the same for how long until all trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.cluster.lab.build import up
from shoal.cluster.lab.spec import make_spec
from shoal.events import read_events
from shoal.runfolder import RunFolder
from shoal.trials.chaos.actions import Action, Cut, Freeze, Heal, KillAgent, KillNode, KillRank, PowerOn
from shoal.trials.chaos.ground import Ground
from shoal.trials.chaos.inject import Injector

# What is done, and after how many seconds it is undone where it does not end by itself.
FAULTS: dict[str, tuple[Action, tuple[Action, ...], float]] = {
    "1   kill -9 of a rank": (KillRank(rank=2), (), 0.0),
    "2   kill -9 of the leading agent": (KillAgent(node="node1"), (PowerOn(node="node1"),), 2.0),
    "3   every process of a node": (KillNode(node="node3"), (PowerOn(node="node3"),), 2.0),
    "3s  a cable pulled, then back": (Cut(between=("node3",)), (Heal(),), 6.0),
    "6   a node frozen for 6 s": (Freeze(node="node2", for_s=6.0), (), 0.0),
}
TINY = ("model.layers=1", "model.heads=2", "model.width=16", "model.seq_len=16", "data.sentences=400")
_DEADLINE_S = 90.0


class Training:
    def __init__(self, folder: Path, on: str) -> None:
        self.run = RunFolder(folder)
        sets = (*TINY, "members.restarts=1000", "train.steps=10000000")
        words = [sys.executable, "-m", "shoal", "train", "--on", on, "--detach", "--out", str(folder)]
        subprocess.run([*words, *(word for each in sets for word in ("--set", each))], check=True, capture_output=True)
        self.await_(lambda: len(self.commits()) > 40, "the first steps")

    def commits(self) -> list[dict[str, Any]]:
        return [record for record in read_events(self.run.commits) if "step" in record] if self.is_there() else []

    def is_there(self) -> bool:
        return self.run.commits.exists()

    def first_after(self, at: float) -> float | None:
        """When the first commit came of a generation that began after the fault."""
        commits = self.commits()
        before = max(_number(record) for record in commits if record["time"] <= at)
        return next((record["time"] for record in commits if _number(record) > before), None)

    def all_train(self) -> bool:
        return len(self.commits()[-1]["members"]) == 3

    def await_(self, what: Any, words: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_DEADLINE_S:.0f} s for {words}; look at {self.run.path}")
            time.sleep(0.02)

    def end(self) -> None:
        subprocess.run([sys.executable, "-m", "shoal", "stop", str(self.run.path)], check=False, capture_output=True)


def _number(record: dict[str, Any]) -> int:
    return int(record["generation"].partition("-")[0])


def play(training: Training, injector: Injector, name: str) -> tuple[float, float]:
    action, undo, undo_after_s = FAULTS[name]
    at = float(str(injector.inject(action)["time"]))
    training.await_(lambda: training.first_after(at) is not None, "the next commit")
    went_on = training.first_after(at) or 0.0
    time.sleep(max(0.0, at + undo_after_s - time.time()))
    back = time.time() if not undo else 0.0
    for each in undo:
        back = float(str(injector.inject(each)["time"]))
    training.await_(training.all_train, "all three")
    return went_on - at, time.time() - max(back, at + (action.for_s or 0.0 if isinstance(action, Freeze) else 0.0))


def describe(times: Sequence[float]) -> str:
    p95 = statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    return f"p50 {statistics.median(times):5.2f} s  p95 {p95:5.2f} s  worst {max(times):5.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fault", action="append", help="the beginning of its name; may be repeated")
    chosen = parser.parse_args()
    names = [name for name in FAULTS if not chosen.fault or name.startswith(tuple(chosen.fault))]
    draw = random.Random(1)
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lab = up(make_spec(3, name=f"faults-{os.getpid()}"), owner=os.getpid())
        training = Training(Path(folder) / "run", f"lab:{lab.name}")
        injector = Injector("benchmark", training.run, Ground(f"lab:{lab.name}", lab), draw)
        try:
            for name in names:
                found[name] = []
                for _ in range(chosen.rounds):
                    time.sleep(1 + draw.random())
                    found[name].append(play(training, injector, name))
                print(f"{name:34} next commit {describe([went for went, _ in found[name]])}", flush=True)
                print(f"{'':34} all again   {describe([back for _, back in found[name]])}", flush=True)
            print(f"generations {_number(training.commits()[-1])}, load {os.getloadavg()[0]:.1f}")
        finally:
            injector.close()
            training.end()
            lab.close()
    print(json.dumps({name.strip(): [round(went, 3) for went, _ in times] for name, times in found.items()}))


if __name__ == "__main__":
    main()

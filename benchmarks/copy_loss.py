"""The source of a copy is killed in the middle of it, again and again in one training; for each way of exchanging.

    sudo .venv/bin/python benchmarks/copy_loss.py --rounds 10
    sudo .venv/bin/python benchmarks/copy_loss.py --rounds 10 --sync streaming --model 13m

Three emulated nodes. In each round a rank is killed; as soon as a copy begins (the survivors' where replicas part,
otherwise that to the rank that comes back) the sending rank is killed as well. Then all are waited for. The link is as
slow as it takes for the copy to last a second. Printed for each training: how many rounds it survived, the time from
the second kill to the next step, how often it had to go back to a checkpoint, whether ledger and replicas are clean,
and the exit code.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import NotInTime, options, wait_until
from shoal.cluster.lab import ShoalLab
from shoal.config.load import build_config
from shoal.cost.model_size import parameter_count
from shoal.errors import ShoalError
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder
from shoal.tools.chaos.actions import KillRank, KillSourceInCopy
from shoal.tools.chaos.inject import Injector
from shoal.tools.chaos.judge import compare_digests, newest_generation
from shoal.tools.chaos.run import ScenarioWatch
from shoal.tools.chaos.scenario import ScenarioRecord
from shoal.tools.chaos.testbed import TestBed
from shoal_lab.spec import make_spec

NODES = 3
_DEADLINE_S = 240.0
_COPY_S = 1.0
_DIGEST_EVERY = 5

SYNCS = {
    "ddp": (),
    "stock": ("sync.mode=stock",),
    "accumulate": ("sync.accumulate=2",),
    "local": ("sync.mode=local", "sync.every=4"),
    "diloco": ("sync.mode=diloco", "sync.every=4"),
    "streaming": ("sync.mode=streaming", "sync.every=8", "sync.fragments=2", "sync.overlap=2"),
}
MODELS = {
    "small": ("model.layers=1", "model.heads=2", "model.width=32", "model.seq_len=32"),
    "13m": ("model.layers=4", "model.heads=8", "model.width=512", "model.seq_len=32", "train.micro_batch=1"),
}
COMMON = (
    "data.sentences=400",
    "train.global_batch=6",
    "train.compile=off",
    "train.steps=10000000",
    "train.eval_every=1000000",
    "train.checkpoint_every=50",
    "members.restarts=1000",
    f"members.digest_every={_DIGEST_EVERY}",
)


@dataclass(frozen=True)
class Result:
    name: str
    rounds: int
    survived: int
    recoveries_s: list[float]
    went_back: int
    ledger_ok: bool
    equal: bool | None
    exit_code: int | None
    trouble: str = ""

    def row(self) -> str:
        times = self.recoveries_s
        p50, worst = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")
        survived = f"{self.survived}/{self.rounds}"
        equal = {True: "equal", False: "DIFFER", None: "not compared"}[self.equal]
        ledger = "ok" if self.ledger_ok else "BROKEN"
        cells = f"{self.name:18} {survived:>8} {p50:>6} {worst:>6} {self.went_back:>5}  {ledger:6} {equal:12}"
        return f"{cells} {self.exit_code} {self.trouble}"


HEAD = f"{'sync, model':18} {'survived':>8} {'p50 s':>6} {'worst':>6} {'back':>5}  ledger replicas     exit"


class Training:
    def __init__(self, folder: Path, on: str, sets: Sequence[str]) -> None:
        self.run = RunFolder(folder)
        self.watch = ScenarioWatch(self.run)
        words = [sys.executable, "-m", "shoal", "train", "--on", on, "--detach", "--out", str(folder)]
        subprocess.run([*words, *(word for each in sets for word in ("--set", each))], check=True, capture_output=True)

    @property
    def record(self) -> ScenarioRecord:
        return self.watch.record

    def is_whole(self, after: float) -> bool:
        """All ranks are in the newest generation and have done a step in it since that moment."""
        newest = newest_generation(self.record)
        if newest is None or int(newest["size"]) < NODES:
            return False
        entered = [each for each in self.record.rank_events("membership") if each["generation"] == newest["generation"]]
        since = max(after, *(float(each["time"]) for each in entered))
        stepped = {each["rank"] for each in self.record.rank_events("step") if float(each["time"]) > since}
        return len(entered) == NODES and len(stepped) == NODES

    def next_step(self, after: float) -> float | None:
        """The first step in a generation that ranks entered after that moment."""
        entered = [float(each["time"]) for each in self.record.rank_events("membership") if float(each["time"]) > after]
        steps = [float(each["time"]) for each in self.record.rank_events("step")]
        return min((at for at in steps if entered and at > min(entered)), default=None)

    def await_(self, what: Callable[[], object], words: str) -> None:
        def has_come() -> bool:
            self.watch.poll()
            value = bool(what())
            if not value and self.watch.ended is not None:
                raise NotInTime(f"the run ended before {words}: {self.watch.ended.get('seen')}")
            return value

        wait_until(has_come, _DEADLINE_S, why=lambda: words, every_s=0.05)

    def end(self) -> int | None:
        words = [sys.executable, "-m", "shoal", "stop", str(self.run.path)]
        subprocess.run(words, check=False, capture_output=True, timeout=300)
        self.watch.poll()
        return None if self.watch.ended is None else int(self.watch.ended["code"])


def play(name: str, sets: Sequence[str], rounds: int) -> Result:
    config = build_config("grammar", None, sets=list(sets))
    copied_bytes = 4 * 4 * parameter_count(config.model)
    rate_mbit = max(4, round(8 * copied_bytes / _COPY_S / 1e6))
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        lab = ShoalLab.build(make_spec(NODES, name=f"copy-{os.getpid()}", link=f"{rate_mbit}mbit"), owner=os.getpid())
        try:
            training = Training(Path(folder) / "run", f"lab:{lab.name}", sets)
            injector = Injector("benchmark", training.run, TestBed(f"lab:{lab.name}", lab), draw)
            recoveries, survived, trouble = [], 0, ""
            try:
                training.await_(lambda: training.is_whole(0.0), "the first steps")
                for _ in range(rounds):
                    time.sleep(1 + draw.random())
                    injector.inject(KillRank(rank=draw.randrange(NODES)))
                    at = float(str(injector.inject(KillSourceInCopy(within_s=_DEADLINE_S))["time"]))
                    training.await_(lambda at=at: training.next_step(at), "the next step")  # type: ignore[misc]
                    recoveries.append((training.next_step(at) or at) - at)
                    training.await_(lambda at=at: training.is_whole(at), "all ranks")  # type: ignore[misc]
                    survived += 1
                    print(f"  {name} {survived}: next step after {recoveries[-1]:.1f} s", file=sys.stderr, flush=True)
                # Long enough that the last generation compares its replicas.
                compared = training.watch.furthest_step + 2 * _DIGEST_EVERY
                training.await_(lambda: training.watch.furthest_step >= compared, "a comparison of replicas")
            except (NotInTime, ShoalError) as error:
                trouble = str(error)
            finally:
                injector.close()
            exit_code = training.end()
            ledger = check_ledger(training.record.commits)
            equal, _ = compare_digests(training.record, _DIGEST_EVERY)
            went_back = {each["step"] for each in training.record.rank_events("recovery")}
            return Result(name, rounds, survived, recoveries, len(went_back), ledger.ok, equal, exit_code, trouble)
        finally:
            lab.close()


def main() -> None:
    parser = options(__doc__, rounds_=10, quick={"sync": ["ddp"], "model": ["small"]})
    parser.add_argument("--sync", action="append", choices=list(SYNCS), help="may be repeated")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated")
    chosen = parser.parse_args()
    print(HEAD, flush=True)
    for model in chosen.model or list(MODELS):
        for sync in chosen.sync or list(SYNCS):
            result = play(f"{sync}, {model}", [*COMMON, *MODELS[model], *SYNCS[sync]], chosen.rounds)
            print(result.row(), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()

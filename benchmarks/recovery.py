"""From a fault to the next step: torchrun and torchft beside shoal, the same small GPT on three emulated nodes.

    sudo .venv/bin/python benchmarks/recovery.py --rounds 3
    sudo .venv/bin/python benchmarks/recovery.py --rival torchrun,shoal --fault 1,3s --json recovery.json

The network namespaces need root or a user namespace, freezing a node needs root. Every rank notes the moment of each
step that it completes; a fault is timed from just before it is made to the first step of the survivors that could not
have been on its way already. Waits end after `--deadline-s`. Each measurement has a lab of its own; rivals take turns.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from _common import options
from rivals.faults import FAULTS, Fault
from rivals.jobs import Job, Shoal, ShoalSession, Torchft, Torchrun, TunedTorchrun
from rivals.journal import Recovery, Return, coming_back, last_before, recovery
from rivals.torchft_venv import PUBLISHED, Unavailable, torchft_python
from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec

RIVALS: dict[str, type[Job]] = {
    "torchrun": Torchrun,
    "torchrun-tuned": TunedTorchrun,
    "torchft": Torchft,
    "shoal": Shoal,
    "session": ShoalSession,
}
_NODES = 3
_START_S = 240.0
# Past the first checkpoint, so that there is one to resume from.
_WARM_STEPS = 25
_POLL_S = 0.05
# Ranks whose agent is gone may take a few more steps before the job notices and ends.
_WATCH_S = 30.0


@dataclass(frozen=True)
class Result:
    """`over` says how the job ended, where it did; `back` is about the node that was hit, where it lives on. `load` is
    the machine's over the last minute: three ranks that share two cores with others recover later."""

    rival: str
    fault: str
    recovery: Recovery | None
    over: str
    back: Return | None
    load: float


def measure(rival: str, key: str, deadline_s: float, keep: Path | None) -> Result:
    fault = FAULTS[key]
    with _lab() as lab, _folder(keep, f"{rival}-{key}") as folder:
        job = RIVALS[rival](lab, folder)
        try:
            job.start()
            problem = _await_training(job)
            if problem:
                return Result(rival, key, None, problem, None, _load())
            return _strike(job, rival, key, fault, deadline_s)
        finally:
            job.end()


def _strike(job: Job, rival: str, key: str, fault: Fault, deadline_s: float) -> Result:
    survivors = [node for node in job.nodes if node != fault.node]
    began = fault.begin(job)
    try:
        found, over = _await_recovery(job, began, survivors, min(deadline_s, fault.lasting_s or deadline_s))
        if not over:
            time.sleep(max(0.0, began + (fault.lasting_s or _WATCH_S) - time.time()))
    finally:
        # A frozen process can't even be ended.
        if fault.lift:
            fault.lift(job)
    woke = time.time()
    if found is None and not over:
        found, over = _await_recovery(job, began, survivors, deadline_s)
    over = over or job.why_over(survivors)
    back = None
    if fault.lift and not over:
        back = _await_return(job, fault.node, woke, survivors, deadline_s)
    elif fault.lasting_s and not over:
        back = coming_back(job.steps(), fault.node, began, survivors)
    return Result(rival, key, None if over else found, over, back, _load())


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _await_training(job: Job) -> str:
    """Why it did not begin, or nothing: one that never does must not end the comparison of the others."""

    def all_train() -> bool:
        last = last_before(job.steps(), time.time())
        # A whole world: an elastic one may have begun with fewer.
        ready = [done for done in last.values() if done.step >= _WARM_STEPS and done.world == len(job.nodes)]
        return len(ready) == len(job.nodes)

    _until(lambda: all_train() or bool(job.why_over(job.nodes)), _START_S)
    if all_train():
        return ""
    over = job.why_over(job.nodes) or f"no step {_WARM_STEPS} on every node within {_START_S:.0f} s"
    return f"it did not begin ({over}; --keep FOLDER keeps the logs)"


def _await_recovery(job: Job, began: float, survivors: Sequence[str], deadline_s: float) -> tuple[Recovery | None, str]:
    """A job that is over on all survivors will not recover: nobody waits for it."""
    over = ""

    def settled() -> bool:
        nonlocal over
        over = job.why_over(list(survivors))
        return bool(over) or recovery(job.steps(), began, survivors) is not None

    _until(settled, began + deadline_s - time.time())
    return recovery(job.steps(), began, survivors), over


def _await_return(job: Job, node: str, woke: float, survivors: Sequence[str], deadline_s: float) -> Return:
    def settled() -> bool:
        return bool(job.why_over([node])) or coming_back(job.steps(), node, woke, survivors).rejoined_s is not None

    _until(settled, deadline_s)
    return coming_back(job.steps(), node, woke, survivors)


def _until(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextmanager
def _lab() -> Iterator[Lab]:
    """It goes with us, also when we are killed."""
    lab = Lab.build(make_spec(_NODES, name=f"recovery-{os.getpid()}", link="1gbit"), owner=os.getpid())
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def _folder(keep: Path | None, name: str) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    yield Path(tempfile.mkdtemp(prefix=f"{name}-", dir=keep))


def describe(result: Result, deadline_s: float) -> str:
    found = result.recovery
    if found is None:
        words = f"none within {deadline_s:.0f} s" if not result.over else f"the job is over: {result.over}"
    else:
        words = f"{found.seconds:.2f} s to the next step, {found.redone} redone, {found.world} ranks"
    return words + (f"; {_describe_return(result.back)}" if result.back else "")


def _describe_return(back: Return) -> str:
    rejoined = "did not rejoin" if back.rejoined_s is None else f"rejoined after {back.rejoined_s:.1f} s"
    return f"the one that was away {rejoined}, {back.stale_steps} steps on its own"


def table(results: Sequence[Result], deadline_s: float) -> str:
    lines = [f"{'fault':40} {'rival':16} {'median':>9} {'worst':>9} {'redone':>6}  survived"]
    for key, fault in FAULTS.items():
        for rival in RIVALS:
            own = [result for result in results if (result.rival, result.fault) == (rival, key)]
            if own:
                lines.append(f"{key:>2}  {fault.title:36} {rival:16} {_figures(own, deadline_s)}")
    return "\n".join(lines)


def _figures(results: Sequence[Result], deadline_s: float) -> str:
    found = [result.recovery for result in results if result.recovery]
    # One that never came counts as later than all others: a median of the lucky ones would hide it.
    seconds = sorted(each.seconds for each in found) + [float("inf")] * (len(results) - len(found))
    redone = max((each.redone for each in found), default=0)
    never = "job over" if all(result.over for result in results if not result.recovery) else f"> {deadline_s:.0f} s"
    middle, worst = (_seconds(value, never) for value in (statistics.median_high(seconds), seconds[-1]))
    return f"{middle:>9} {worst:>9} {redone:>6}  {len(found)} of {len(results)}"


def _seconds(value: float, never: str) -> str:
    return never if value == float("inf") else f"{value:.2f} s"


def choose(text: str, known: Sequence[str], option: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise SystemExit(f"{option} {word!r} is none of: {', '.join(known)}")
    return words


def prepare(rivals: list[str]) -> tuple[list[str], dict[str, str]]:
    """Those that can run here, and why the others cannot."""
    if "torchft" not in rivals:
        return rivals, {}
    try:
        Torchft.python = torchft_python()
    except Unavailable as error:
        return [rival for rival in rivals if rival != "torchft"], {"torchft": str(error)}
    return rivals, {}


def main() -> None:
    parser = options(__doc__, rounds_=1, quick={"rival": "shoal", "fault": "1"})
    parser.add_argument("--rival", default=",".join(RIVALS), help="of: %(default)s")
    parser.add_argument("--fault", default=",".join(FAULTS), help="of: %(default)s")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave journals and logs there")
    chosen = parser.parse_args()
    if chosen.keep:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faults = choose(chosen.fault, list(FAULTS), "--fault")
    rivals, missing = prepare(choose(chosen.rival, list(RIVALS), "--rival"))
    for name, why in missing.items():
        print(f"{name}: not measured. {why}\n{name}: published, not measured here: {PUBLISHED}", flush=True)
    for name in rivals:
        print(f"{name}: {RIVALS[name].settings}", flush=True)
    results: list[Result] = []
    try:
        for number in range(1, chosen.rounds + 1):
            for key in faults:
                for rival in rivals:
                    results.append(measure(rival, key, chosen.deadline_s, chosen.keep))
                    said = describe(results[-1], chosen.deadline_s)
                    print(f"round {number}/{chosen.rounds}  {key:2}  {rival:16} {said}", flush=True)
    finally:
        # Also of a comparison that was interrupted: it may have taken an hour until then.
        print(table(results, chosen.deadline_s))
        if chosen.json:
            write(chosen.json, results, missing)


def write(path: Path, results: Sequence[Result], missing: dict[str, str]) -> None:
    published = dict.fromkeys(missing, PUBLISHED)
    facts = {"missing": missing, "published": published, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How much of all machines' speed a training gets when they are unequal: emulated nodes, against each of them alone.

    sudo .venv/bin/python benchmarks/balance.py --steps 40 --global-batch 256 --rounds 3
    sudo .venv/bin/python benchmarks/balance.py --scale 0.3 --steps 60       on a machine that others use too

Four trials: two nodes with 1 and 0.33 of a core, with equal shares and with shares that follow the speed; three nodes
with 1, 0.66 and 0.33; one of two nodes cut to a third in mid-run and given back; 200 steps on two equal nodes. The
first three are given as parts of three sums, measured anew in every round, since the speed of a shared machine changes
within minutes: what the nodes do alone, one after the other; what they do alone but at the same time, since cores that
share memory and power slow each other; and the ranks' own speeds in the same steps. `--scale` multiplies all cores: a
quota that the machine can always give is measured well even if other programs compute, too. Three nodes need 1.99 cores
at scale 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from _common import options, wait_until
from shoal.events import read_events
from shoal.run_folder import RunFolder

_WARM_STEPS = 25
_CUT_AT, _GIVEN_BACK_AFTER, _FOLLOWED_AFTER = 40, 60, 20
# A training that ended early is noticed by this alone.
_LONGEST_S = 3600.0
_SETTINGS = ("train.eval_every=1000000", "train.checkpoint_every=1000000")


def shoal(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "shoal", *words], check=True, capture_output=True)


def commits(out: Path) -> list[dict[str, Any]]:
    path = RunFolder(out).commits
    return list(read_events(path)) if path.exists() else []


def train(folder: Path, name: str, on: str, steps: int, *options_: str) -> list[dict[str, Any]]:
    """Train; return the lines of the ledger."""
    out = folder / name
    sets = [word for setting in _SETTINGS for word in ("--set", setting)]
    shoal("train", "--on", on, "--steps", str(steps), "--out", str(out), *sets, *options_)
    return commits(out)


def samples_per_s(records: Sequence[dict[str, Any]], first: int, last: int) -> float:
    """Return the speed between two steps: the median, since a checkpoint or another program may stop one of them."""
    times = {record["step"]: record["time"] for record in records}
    begin, end = records[0]["samples"]
    return float((end - begin) / median(times[step] - times[step - 1] for step in range(first + 1, last + 1)))


def part_of_own_speeds(out: Path, first: int, last: int) -> float:
    """Return the speed between two steps as a part of the sum of the ranks' speeds while they computed in these steps.

    It does not count what smaller micro-batches cost, and nothing that slows all nodes when they compute at once.
    """
    records = commits(out)
    shares = {record["step"]: record["shares"] for record in records}
    own = 0.0
    for rank in range(len(shares[last])):
        steps = [event for event in read_events(RunFolder(out).events(rank)) if event["event"] == "step"]
        own += median(
            shares[step["step"]][rank] / (step["data_s"] + step["forward_s"] + step["backward_s"])
            for step in steps
            if first < step["step"] <= last
        )
    return round(samples_per_s(records, first, last) / own, 3)


def on(cores: Sequence[float]) -> str:
    return f"lab:{len(cores)},cpu={'/'.join(f'{part:g}' for part in cores)}"


def alone(folder: Path, cores: float, steps: int, *options_: str) -> float:
    return samples_per_s(train(folder, f"alone-{cores:g}", on([cores]), steps, *options_), steps // 4, steps)


def alone_at_once(folder: Path, cores: Sequence[float], steps: int, *options_: str) -> float:
    """Return the sum of the speeds of nodes that train at the same time and know nothing of each other."""
    outs = [folder / f"at-once-{number}" for number in range(len(cores))]
    try:
        for out, part in zip(outs, cores, strict=True):
            sets = [word for setting in _SETTINGS for word in ("--set", setting)]
            shoal("train", "--on", on([part]), "--steps", "100000", "--out", str(out), "--detach", *sets, *options_)
        for out in outs:
            await_step(out, 3)
        began = [commits(out)[-1]["step"] for out in outs]
        for out, step in zip(outs, began, strict=True):
            await_step(out, step + steps)
        ends = [commits(out) for out in outs]
    finally:
        for out in outs:
            if out.exists():
                shoal("stop", str(out), "--now")
    return sum(samples_per_s(records, first, records[-1]["step"]) for records, first in zip(ends, began, strict=True))


def await_step(out: Path, step: int) -> None:
    wait_until(lambda: any(record["step"] >= step for record in commits(out)[-3:]), _LONGEST_S, every_s=0.1)


def cut_and_give_back(folder: Path, cores: float, *options_: str) -> list[dict[str, Any]]:
    """Cut one of two equal nodes to a third in mid-run, and give it back; return the lines of the ledger."""
    name, out = "balance-bench", folder / "cut"
    steps = _CUT_AT + 2 * _GIVEN_BACK_AFTER
    shoal("lab", "up", "2", "--name", name, "--cpu", f"{cores:g}")
    try:
        sets = [word for setting in _SETTINGS for word in ("--set", setting)]
        shoal("train", "--on", f"lab:{name}", "--steps", str(steps), "--out", str(out), "--detach", *sets, *options_)
        for at, now in ((_CUT_AT, cores / 3), (_CUT_AT + _GIVEN_BACK_AFTER, cores)):
            await_step(out, at)
            shoal("lab", "cpu", "node2", f"{now:g}", "--name", name)
        await_step(out, steps)
        shoal("attach", str(out))
    finally:
        shoal("lab", "down", "--name", name)
    return commits(out)


def changes(records: Sequence[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """Return the steps that had other shares than the step before, and these."""
    return [
        (after["step"], after["shares"]) for before, after in pairwise(records) if before["shares"] != after["shares"]
    ]


def main() -> None:
    parser = options(__doc__, rounds_=1, steps=80, quick={"steps": 8, "only": "noise"}, trains=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--only", choices=("two", "three", "cut", "noise"))
    chosen = parser.parse_args()
    for number in range(chosen.rounds):
        measure(chosen, number)


def measure(chosen: Namespace, number: int) -> None:
    """Measure every chosen trial once and print a line for each."""
    batch = ("--global-batch", str(chosen.global_batch), *(word for each in chosen.sets for word in ("--set", each)))
    full, medium, low = (round(chosen.scale * part, 4) for part in (1.0, 0.66, 0.33))
    alone_steps = max(8, chosen.steps // 4)
    warm = min(_WARM_STEPS, chosen.steps // 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds: dict[float, float] = {}

        def part_of_sum(cores: Sequence[float], records: Sequence[dict[str, Any]], first: int, last: int) -> float:
            for part in cores:
                if part not in speeds:
                    speeds[part] = alone(folder, part, alone_steps, *batch)
            return round(samples_per_s(records, first, last) / sum(speeds[part] for part in cores), 3)

        def part_at_once(cores: Sequence[float], records: Sequence[dict[str, Any]], first: int, last: int) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                possible = alone_at_once(Path(own), cores, alone_steps, *batch)
            return round(samples_per_s(records, first, last) / possible, 3)

        def two() -> dict[str, Any]:
            equal = train(folder, "equal", on([full, low]), chosen.steps, "--balance", "off", *batch)
            balanced = train(folder, "balanced", on([full, low]), chosen.steps, *batch)
            return {
                "equal shares": part_of_sum([full, low], equal, warm, chosen.steps),
                "shares by speed": part_of_sum([full, low], balanced, warm, chosen.steps),
                "of the nodes at once": part_at_once([full, low], balanced, warm, chosen.steps),
                "of own speeds": part_of_own_speeds(folder / "balanced", warm, chosen.steps),
                "changes": changes(balanced),
            }

        def three() -> dict[str, Any]:
            records = train(folder, "three", on([full, medium, low]), chosen.steps, *batch)
            return {
                "shares by speed": part_of_sum([full, medium, low], records, warm, chosen.steps),
                "of the nodes at once": part_at_once([full, medium, low], records, warm, chosen.steps),
                "of own speeds": part_of_own_speeds(folder / "three", warm, chosen.steps),
                "changes": changes(records),
            }

        def cut() -> dict[str, Any]:
            records = cut_and_give_back(folder, full, *batch)
            back = _CUT_AT + _GIVEN_BACK_AFTER
            third = round(full / 3, 4)
            spans = ((_CUT_AT + _FOLLOWED_AFTER, back), (back + _FOLLOWED_AFTER, len(records)))
            return {
                "cut": part_of_sum([full, third], records, *spans[0]),
                "given back": part_of_sum([full, full], records, *spans[1]),
                "cut, of the nodes at once": part_at_once([full, third], records, *spans[0]),
                "given back, of the nodes at once": part_at_once([full, full], records, *spans[1]),
                "of own speeds": [part_of_own_speeds(folder / "cut", *span) for span in spans],
                "changes": changes(records),
            }

        def noise() -> dict[str, Any]:
            return {"changes": changes(train(folder, "noise", on([full, full]), 200, "--balance", "live", *batch))}

        trials: dict[str, Callable[[], dict[str, Any]]] = {"two": two, "three": three, "cut": cut, "noise": noise}
        setting = {"round": number, "scale": chosen.scale, "batch": chosen.global_batch}
        for trial, run in trials.items():
            if chosen.only in (None, trial):
                print(json.dumps({"trial": trial, **setting, **run()}), flush=True)


if __name__ == "__main__":
    main()

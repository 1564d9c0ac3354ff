"""Count what a rank keeps of weights, gradients and moments, alone and on two ranks with and without division."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

SCRIPT = Path(__file__).with_name("memory.py")
RUNS = {"one": (1, "ddp"), "ddp": (2, "ddp"), "zero1": (2, "zero1")}
PARTS = ("weights", "gradients", "moments")


@dataclass(frozen=True)
class Kept:
    """What the rank that keeps the most has: bytes of a parameter, and MB of the process."""

    bytes: dict[str, float]
    peak_mb: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def run(experiment: Experiment) -> Result:
    (experiment.folder / SCRIPT.name).write_text(SCRIPT.read_text())
    kept = {name: train(experiment, name, *RUNS[name]) for name in RUNS}
    one, ddp, zero1 = kept.values()
    plans = {
        sync: experiment.shoal("plan", "gpt2-760m", "--nodes", "1,2", "--sync", sync, "--json").json()["rows"]
        for sync in ("ddp", "zero1")
    }
    needed = {sync: [1e-9 * row["memory_bytes"] for row in rows] for sync, rows in plans.items()}
    return Result(
        theory={"ddp": 100.0, "zero1": 100 * (8 + 8 / 2) / 16},
        measured={"ddp": 100 * ddp.total / one.total, "zero1": 100 * zero1.total / one.total},
        checks=[
            Check("one rank keeps 16 bytes a parameter", is_near(one.total, 16), f"{one.total:.2f}"),
            Check("ddp: 16 bytes on each of two", is_near(ddp.total, 16), f"{ddp.total:.2f}"),
            Check("zero1: 8 + 8/2 bytes on each of two", is_near(zero1.total, 12), f"{zero1.total:.2f}"),
            Check(
                "the whole process with ddp needs as much as alone, within 10%",
                is_near(ddp.peak_mb, one.peak_mb),
                f"{ddp.peak_mb:.0f} and {one.peak_mb:.0f} MB",
            ),
            Check(
                "the whole process with zero1 needs less than with ddp",
                zero1.peak_mb < ddp.peak_mb,
                f"{zero1.peak_mb:.0f} and {ddp.peak_mb:.0f} MB",
            ),
        ],
        figures={
            "one": one.total,
            "ddp_bytes": ddp.total,
            "zero1_bytes": zero1.total,
            **zero1.bytes,
            **{f"peak_{name}": one.peak_mb for name, one in kept.items()},
            "plan_ddp": needed["ddp"][1],
            "plan_one": needed["zero1"][0],
            "plan_two": needed["zero1"][1],
        },
        picture=Bars(
            "What a rank keeps of each parameter",
            "bytes",
            ["1 rank", "2 ranks, ddp", "2 ranks, zero1"],
            {part: [one.bytes[part] for one in kept.values()] for part in PARTS},
        ),
    )


def train(experiment: Experiment, name: str, ranks: int, sync: str) -> Kept:
    # Of several ranks on one machine, shared memory would keep the gradients of all.
    options = ("--on", f"local:{ranks}", "--sync", sync, "--set", "sync.inside=gloo", "--out", name)
    layers = "12" if experiment.is_quick else "24"
    experiment.shoal("run", *options, SCRIPT.name, name, layers)
    counted = [json.loads((experiment.folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    peak_bytes = experiment.read_run(name).summary.peak_memory_bytes or 0.0
    # They have been counted, and take 2 GB of the disk for each try.
    for state in (experiment.folder / name).rglob("*.safetensors"):
        state.unlink()
    return Kept({part: max(one[part] / one["parameters"] for one in counted) for part in PARTS}, 1e-6 * peak_bytes)


def is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 0.1 * expected

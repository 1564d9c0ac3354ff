"""Measure one and two ranks on this machine, find the largest cost, and write the folder of the lab sheet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from shoal.tools.learn.experiment import Check, Experiment, Result

SHEET = (
    "seed", "lab", "backend", "world_size", "model_params", "steps", "allreduce_p50_ms", "allreduce_p95_ms",
    "tokens_per_sec_1proc", "tokens_per_sec_2proc", "byte_equivalent", "lesson_notes",
)  # fmt: skip
# What the largest cost means, in the explanation.
CAUSES = {
    "cores": "Here the computing itself costs the most: both share the cores and the memory of one machine.",
    "all-reduce": "Here it is so: backward hid too little of it.",
    "waiting": "Here waiting cost the most: each step ends with the slower one of the two.",
}
COMPUTING = ("data", "forward", "backward", "optimizer", "other")


def run(experiment: Experiment) -> Result:
    words = ("--ranks", "1,2", "--steps", experiment.steps(100, quick=4), "--set", "sync.inside=gloo")
    document = experiment.shoal("bench", "scaling", *words, "--out", "scaling", "--json", cores=2).json()
    one, two = document["rows"]
    for row in (one, two):
        experiment.note_load(row["other_programs_cores"])
    costs = costs_of(one, two)
    cause = max(costs, key=lambda name: costs[name])
    sheet = experiment.files / "lab-01"
    manifest = write_sheet(experiment.folder / "scaling", sheet)
    states = sorted(sheet.glob("state-rank-*"))
    missing = [name for name in SHEET if manifest.get(name) in (None, "")]
    return Result(
        theory={"speedup": 1.0, "cause": "cores"},
        measured={"speedup": two["speedup"], "cause": cause},
        checks=[
            Check(
                "the manifest has its twelve fields, and the paragraph that compares one with two",
                not missing and manifest["lesson_notes"].startswith("Two ranks were"),
                f"missing: {', '.join(missing)}" if missing else "",
            ),
            Check(
                "both states are equal to the bit",
                len(states) == 2 and states[0].read_bytes() == states[1].read_bytes(),
            ),
        ],
        figures={
            "speedup": two["speedup"],
            "ideal": 500 * one["step_s"],
            "step": 1e3 * two["step_s"],
            "cores": 1e3 * costs["cores"],
            "allreduce": 1e3 * costs["all-reduce"],
            "waiting": 1e3 * costs["waiting"],
            "cause": CAUSES[cause],
            "folder": str(Path(experiment.files.parent.name, experiment.files.name, sheet.name)),
        },
    )


def costs_of(one: dict[str, Any], two: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step of two ranks beyond half of that of one, by cause."""
    computing = sum(two["phases"][name] - one["phases"][name] / 2 for name in COMPUTING)
    return {"cores": computing, "all-reduce": two["phases"]["exposed"], "waiting": two["phases"]["wait"]}


def write_sheet(scaling: Path, sheet: Path) -> dict[str, Any]:
    """Write the files that the lab sheet asks for; return its manifest."""
    run = scaling / "ranks-2"
    sheet.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("train.py"), sheet / "train.py")
    shutil.copyfile(scaling / "scaling.png", sheet / "scaling.png")
    for path in (run / "timings.jsonl", *sorted(run.glob("state-rank-*.safetensors"))):
        shutil.copyfile(path, sheet / path.name)
    known = json.loads((run / "manifest.json").read_text()) | {"lab": "01-ddp-on-cpu"}
    manifest = {name: known.get(name) for name in SHEET}
    (sheet / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest

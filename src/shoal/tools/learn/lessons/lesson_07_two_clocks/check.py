"""Run a script that reads two clocks in the same steps, and compare them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shoal.tools.learn.experiment import Check, Experiment, Lines, Result

SCRIPT = Path(__file__).with_name("two_clocks.py")


def run(experiment: Experiment) -> Result:
    steps = int(experiment.steps(60, quick=6))
    (experiment.folder / SCRIPT.name).write_text(SCRIPT.read_text())
    experiment.shoal("run", "--measure", "--on", "local:2", "--out", "run", SCRIPT.name, "times.json", str(steps))
    experiment.read_run("run")
    seconds = json.loads((experiment.folder / "times.json").read_text())
    times = {name: 1e3 * np.array(values) for name, values in seconds.items()}
    barrier, hook, alone = (float(np.median(times[name])) for name in ("barrier_s", "hook_s", "alone_s"))
    added = barrier - alone
    is_within = bool(np.all(times["barrier_s"] >= times["hook_s"]))
    return Result(
        theory={"longer": "barriers", "added": "shorter"},
        measured={"longer": "barriers" if barrier > hook else "hook", "added": "shorter" if added < hook else "longer"},
        checks=[
            Check("every step was timed by both clocks", len(times["barrier_s"]) == len(times["hook_s"]) == steps),
            Check("the hook's time is within that of the barriers in every step", is_within),
            Check("the hook measured an exchange in every step", bool(np.all(times["hook_s"] > 0)), f"{hook:.1f} ms"),
        ],
        figures={
            "barrier": barrier,
            "hook": hook,
            "alone": alone,
            "added": added,
            "barrier_p95": float(np.percentile(times["barrier_s"], 95)),
            "hook_p95": float(np.percentile(times["hook_s"], 95)),
        },
        picture=Lines(
            "Backward by two clocks, and without an exchange",
            "step",
            "ms",
            {
                title: (range(1, steps + 1), times[name].tolist())
                for name, title in (("barrier_s", "barriers"), ("hook_s", "hook"), ("alone_s", "without exchange"))
            },
        ),
    )

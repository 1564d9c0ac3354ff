"""Count with the interfaces of emulated nodes what an all-reduce sends."""

from __future__ import annotations

from shoal.tools.learn.experiment import Experiment, Result

NODES = {"two": 2, "three": 3}


def run(experiment: Experiment) -> Result:
    steps = experiment.steps(12, quick=4)
    # Three nodes divide this batch evenly, too.
    options = ("--steps", steps, "--global-batch", "12")
    theory: dict[str, float | str] = {}
    measured: dict[str, float | str | None] = {}
    gradients = 0.0
    for name, nodes in NODES.items():
        manifest = experiment.train(name, "--on", f"lab:{nodes}", *options).manifest
        gradients = 4e-6 * manifest["model_params"]
        theory[name] = 2 * (nodes - 1) / nodes * gradients
        sent = manifest["wire_bytes_per_step"]
        measured[name] = None if sent is None else sent / 1e6
    two, three = (float(measured[name] or 0.0) for name in NODES)
    return Result(
        theory=theory,
        measured=measured,
        figures={
            "gradients": gradients,
            "two": two,
            "three": three,
            "many": 2 * gradients * 999 / 1000,
            "excess": 100 * (three / float(theory["three"]) - 1),
        },
    )

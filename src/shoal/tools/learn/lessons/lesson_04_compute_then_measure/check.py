"""Predict the exchange over a slow link by arithmetic and from a probe, and measure it in a training."""

from __future__ import annotations

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

RATE = 100e6
PAYLOAD = 0.96
CLUSTER = "lab:2,link=100mbit"


def run(experiment: Experiment) -> Result:
    budget = "5" if experiment.is_quick else "20"
    profile = experiment.shoal("probe", "--on", CLUSTER, "--budget", budget, "-o", "profile.toml", "--json").json()
    for node in profile["nodes"]:
        experiment.note_load(node["other_programs_cores"])
    steps = experiment.steps(24, quick=4)
    trained = experiment.train(
        "trained", "--on", CLUSTER, "--steps", steps, "--plan", "--profile", "profile.toml"
    ).manifest
    sent = 4.0 * trained["model_params"]
    [line] = [one for one in profile["collectives"] if one["op"] == "all-reduce" and one["element_bytes"] == 4]
    theory = 8e3 * sent / (PAYLOAD * RATE)
    fit = 1e3 * (line["alpha_s"] + line["beta_s_per_byte"] * sent)
    measured = trained["allreduce_p50_ms"]
    efficiency = profile["summary"]["stack_efficiency"]
    wire = trained["wire_bytes_per_step"] or 0.0
    error = fit / measured - 1
    return Result(
        theory={"exchange": theory},
        measured={"exchange": measured},
        checks=[
            Check(
                "each node sent its gradients once in a step, and at most 10% for headers and messages of the run",
                abs(wire / sent - 1) < 0.1,
                f"{wire / 1e6:.2f} MB for {sent / 1e6:.2f}",
            ),
            Check("the probe's line is within 20% of the training", abs(error) <= 0.2, f"{100 * error:+.0f}%", True),
            Check(
                "gloo uses the link well: stack efficiency from 0.85 to 1.05",
                0.85 <= efficiency <= 1.05,
                f"{efficiency:.2f}",
                is_timing=True,
            ),
        ],
        figures={
            "theory": theory,
            "fit": fit,
            "alpha": 1e3 * line["alpha_s"],
            "beta": 1e9 * line["beta_s_per_byte"],
            "measured": measured,
            "efficiency": 100 * efficiency,
        },
        picture=Bars(
            "One all-reduce of 6.65 MB over 100 Mbit/s",
            "ms",
            ["arithmetic", "probe", "training"],
            {"ms": [theory, fit, measured]},
        ),
    )

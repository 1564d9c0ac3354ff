"""Compare the slowest of N ranks by an integral, in a simulation, and in a real run of two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result, TrainedRun

SIGMA = 0.2
RANKS = {"three": 3, "eight": 8, "many": 1024}
SCENARIO = """
nodes = {ranks}
step_s = {usual_s}
tokens_per_step = 1
hours = 10
mtbf_hours = inf
recovery = "live"
straggler = "lognormal:{sigma}"
"""
Floats = np.ndarray[Any, np.dtype[np.float64]]


def run(experiment: Experiment) -> Result:
    # The usual step of a simulation is the median; the mean is to be 1 s.
    usual_s = float(np.exp(-(SIGMA**2) / 2))
    theory = {name: 100 * (slowest_of_lognormal(ranks) - 1) for name, ranks in RANKS.items()}
    simulated: dict[str, float] = {}
    for name, ranks in RANKS.items():
        text = SCENARIO.format(ranks=ranks, usual_s=usual_s, sigma=SIGMA)
        (experiment.folder / f"{name}.toml").write_text(text)
        document = experiment.shoal("simulate", f"{name}.toml", "--json").json()
        spent = document["policies"]["live"]["mean_s"]
        simulated[name] = 100 * (usual_s * sum(spent.values()) / spent["useful"] - 1)
    trained = experiment.train(
        "two-ranks", "--on", "local:2", "--inside", "gloo", "--steps", experiment.steps(120, quick=24)
    )
    own_s = own_parts(trained)
    slowest_s = float(own_s.max(axis=0).mean())
    integral_s = slowest_of(own_s.ravel(), 2)
    return Result(
        theory={name: theory[name] for name in ("three", "eight")},
        measured={name: simulated[name] for name in ("three", "eight")},
        checks=[
            Check(
                "1,024 simulated ranks: within 20% of the integral",
                abs(simulated["many"] / theory["many"] - 1) <= 0.2,
                f"{simulated['many']:.0f}% longer, integral {theory['many']:.0f}%",
            ),
            Check(
                "two real ranks: the slowest is within 20% of the integral over their own steps",
                abs(slowest_s / integral_s - 1) <= 0.2,
                f"{1e3 * slowest_s:.0f} ms, integral {1e3 * integral_s:.0f} ms",
                is_timing=True,
            ),
        ],
        figures={
            **simulated,
            "mean": 1e3 * float(own_s.mean()),
            "spread": 1e3 * float(own_s.std()),
            "slowest": 1e3 * slowest_s,
            "integral": 1e3 * integral_s,
        },
        picture=Bars(
            "The slowest of N ranks, above the mean of one",
            "percent",
            [f"{ranks:,} ranks" for ranks in RANKS.values()],
            {"integral": list(theory.values()), "simulation": list(simulated.values())},
        ),
    )


def slowest_of_lognormal(ranks: int) -> float:
    """Return the mean of the largest of N draws with mean 1: the integral of 1 − F(x)^N over x, from 0 on."""
    z = np.linspace(-8.0, 8.0, 20_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    below = np.clip(np.cumsum(density) * (z[1] - z[0]), 0.0, 1.0)
    x = np.exp(SIGMA * z - SIGMA**2 / 2)
    return float(x[0] + ((1 - below[:-1] ** ranks) * np.diff(x)).sum())


def slowest_of(values: Floats, ranks: int) -> float:
    """Return the mean of the largest of N draws from measured values."""
    below = np.arange(len(values) + 1) / len(values)
    return float((np.sort(values) * np.diff(below**ranks)).sum())


def own_parts(trained: TrainedRun) -> Floats:
    """Return the seconds of each step without waiting, a row for each rank; the first steps warm up."""
    rows = [[event["step_s"] - event["wait_s"] for event in trained.events("step", rank)] for rank in (0, 1)]
    steps = min(map(len, rows))
    return np.array([row[steps // 4 : steps] for row in rows])

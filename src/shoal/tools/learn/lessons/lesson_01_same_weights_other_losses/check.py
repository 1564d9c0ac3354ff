"""Compare the own losses of two ranks, step by step, and the digests of their weights."""

from __future__ import annotations

import math

from shoal.tools.learn.experiment import Check, Experiment, Lines, Result


def run(experiment: Experiment) -> Result:
    steps = experiment.steps(20, quick=4)
    trained = experiment.train("two-ranks", "--on", "local:2", "--inside", "gloo", "--steps", steps)
    verified = experiment.shoal("verify", "two-ranks", "--json", codes=(0, 1)).json()
    first, second = ({event["step"]: event["own_loss"] for event in trained.events("step", rank)} for rank in (0, 1))
    mean = {event["step"]: event["loss"] for event in trained.events("loss") + trained.events("step")}
    mean |= {event["step"]: event["loss"] for event in trained.events("loss")}
    digests = list(verified["digests"].values())
    is_same_loss = bool(first) and first == second
    last = max(first)
    average = (first[last] + second[last]) / 2
    checks = [
        Check(
            "both ranks recorded a loss of their own in every step",
            first.keys() == second.keys() and len(first) == int(steps),
            f"{len(first)} and {len(second)} of {steps} steps",
        ),
        Check(
            "the loss of the training is the mean of both",
            math.isclose(average, mean[last], rel_tol=1e-5),
            f"({first[last]:.4f} + {second[last]:.4f}) / 2 = {average:.4f}, printed {mean[last]:.4f}",
        ),
        Check("the ledger is complete: no sample was used twice or skipped", bool(verified["ledger"]["ok"])),
    ]
    numbers = sorted(first)
    return Result(
        theory={"losses": "no", "weights": "yes"},
        measured={
            "losses": "yes" if is_same_loss else "no",
            "weights": "yes" if len(digests) == 2 and len(set(digests)) == 1 else "no",
        },
        checks=checks,
        figures={"first": first[last], "second": second[last], "mean": mean[last]},
        picture=Lines(
            "The loss of each rank, and their mean",
            "step",
            "loss",
            {
                "rank 0": (numbers, [first[step] for step in numbers]),
                "rank 1": (numbers, [second[step] for step in numbers]),
                "mean, as printed": (sorted(mean), [mean[step] for step in sorted(mean)]),
            },
        ),
    )

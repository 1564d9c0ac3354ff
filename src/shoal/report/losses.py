"""The loss of every step, also where ranks came and went. Pure."""

from __future__ import annotations

import numpy as np

from shoal.control.membership.generation import NEVER, Ballot
from shoal.report.membership import Logs, Standing
from shoal.report.ranklog import Floats, RankLog, Steps


def losses(logs: Logs, longest: RankLog) -> tuple[Steps, Floats]:
    """One rank's where nobody came or went: all recorded the same. Otherwise, of every step, what its last generation
    recorded that led to the model at the end."""
    if not any(log.entered for log in logs.values()):
        return longest.steps, longest.column("loss")
    standing = Standing(logs)
    found: dict[int, tuple[Ballot, float]] = {}
    for log in logs.values():
        rows = zip(log.steps.tolist(), log.column("loss").tolist(), log.generations(), strict=True)
        for step, loss, entered in rows:
            generation = entered.generation if entered else NEVER
            if standing.holds(entered, step) and (step not in found or found[step][0] < generation):
                found[step] = (generation, loss)
    steps = sorted(found)
    return np.array(steps, dtype=np.int64), np.array([found[step][1] for step in steps], dtype=np.float64)


def val_losses(logs: Logs) -> dict[int, float]:
    standing = Standing(logs)
    return {
        step: loss
        for log in logs.values()
        for step, loss in sorted(log.val_loss.items())
        if standing.holds(log.entered_at_eval(step), step)
    }

"""What past runs teach the model: how much slower or faster than predicted computing, updating and exchanging were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.profile import Calibration
from shoal.cost.step import StepTime

# A phase that takes less of a step than this says more about noise than about the model.
_WORTH_IT = 0.02
# Further away than this a run was something else than what was predicted.
_MOST = 4.0
_VISIBLE = 0.5


@dataclass(frozen=True)
class Outcome:
    """One run: its prediction from the uncalibrated profile, and the same phases as measured. `comm_s` is None where
    nobody timed the exchange."""

    predicted: StepTime
    compute_s: float
    optimizer_s: float
    exposed_s: float
    comm_s: float | None
    other_s: float
    step_s: float


def calibrate(outcomes: Sequence[Outcome]) -> Calibration:
    """Medians over the runs: one disturbed run must not bend the constants for all others."""
    return Calibration(
        runs=len(outcomes),
        compute=_factor([(each.compute_s, each.predicted.compute_s, each.step_s) for each in outcomes]),
        optimizer=_factor([(each.optimizer_s, each.predicted.optimizer_s, each.step_s) for each in outcomes]),
        comm=_factor([pair for each in outcomes for pair in _exchanges(each)]),
        other_s=max(0.0, statistics.median(each.other_s for each in outcomes)),
    )


def _exchanges(each: Outcome) -> list[tuple[float, float, float]]:
    """Nothing where most of it was hidden: behind backward it takes as long as the cores let it, whatever the wire."""
    if each.comm_s is None or each.exposed_s < _VISIBLE * each.comm_s:
        return []
    return [(each.comm_s, each.predicted.comm_s, each.step_s)]


def _factor(pairs: Sequence[tuple[float, float, float]]) -> float:
    ratios = [
        measured / predicted
        for measured, predicted, step_s in pairs
        if min(measured, predicted) > _WORTH_IT * step_s and 1 / _MOST < measured / predicted < _MOST
    ]
    return statistics.median(ratios) if ratios else 1.0

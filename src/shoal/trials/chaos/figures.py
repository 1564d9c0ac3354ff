"""Many runs of one scenario as a few numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from shoal.trials.chaos.session import Played

TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s", "rejoin_s", "pause_s")


class Spread(BaseModel):
    """Nearest-rank percentiles: with ten runs, p95 is the worst of them."""

    model_config = ConfigDict(frozen=True)

    count: int
    p50: float
    p95: float
    worst: float


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    at = {share: ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95)}
    return Spread(count=len(ordered), p50=at[0.5], p95=at[0.95], worst=ordered[-1])


def spreads(played: Sequence[Played]) -> dict[str, Spread]:
    """By name of the measured time; what never happened has no line."""
    found = {name: [getattr(each.measured, name) for each in played] for name in TIMES}
    known = {name: spread([value for value in values if value is not None]) for name, values in found.items()}
    return {name: value for name, value in known.items() if value is not None}

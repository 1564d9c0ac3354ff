"""How unevenly a run's ranks took their steps: the raw material for simulated stragglers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.errors import DataError
from shoal.events import Event
from shoal.report.ranklog import Floats, RankLog, collect


def own_factors(events: Iterable[Event]) -> Floats:
    """Each rank's own time of each measured step, divided by that rank's median.

    Its own, without the wait: all ranks of a step end together, so whole steps say only how slow the slowest was. By
    its own median: a machine that is always slower is no straggler but part of the step time.
    """
    logs = [log for log in collect(events).values() if len(log.steps)]
    if not logs:
        raise DataError(
            "no rank of this run has recorded a step",
            why="stragglers are fitted to the step times in its events",
            fix="use a run that trained, or state the spread: --straggler lognormal:0.05",
        )
    return np.concatenate([_factors(log, alone=len(logs) == 1) for log in logs])


def _factors(log: RankLog, alone: bool) -> Floats:
    measured = log.measured()
    waited_s = log.column("wait_s")[measured]
    if alone:
        waited_s = np.nan_to_num(waited_s)
    own_s = log.column("step_s")[measured] - waited_s
    own_s = own_s[np.isfinite(own_s) & (own_s > 0)]
    if not len(own_s):
        raise DataError(
            f"rank {log.rank} has not recorded how long it waited for the others",
            why="without it a rank's own time cannot be told from that of the slowest one; --measure off leaves it out",
            fix="train again with --measure hook, or state the spread: --straggler lognormal:0.05",
        )
    return own_s / np.median(own_s)

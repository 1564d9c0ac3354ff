"""How often to write a checkpoint, by Young (1974) and Daly (2006): often enough to redo little, rarely enough to pay
little."""

from __future__ import annotations

import math

from shoal.cost.simulate.scenario import Checkpoints, Cluster, Failures
from shoal.cost.simulate.straggling import Slowest, Straggling


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints, for one failure of anything every `mtbf_s`."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Young's with the next terms; it matters where a checkpoint is not short against the time between failures."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = math.sqrt(cost_s / (2 * mtbf_s))
    return young_s(cost_s, mtbf_s) * (1 + part / 3 + part**2 / 9) - cost_s


def best_every(cluster: Cluster, failures: Failures, straggling: Straggling, checkpoints: Checkpoints) -> int | None:
    """Steps between checkpoints for a training that restarts from them. None: nothing fails, write none.

    A hidden one costs no time, so it is written as often as it can be.
    """
    if math.isinf(failures.mtbf_s):
        return None
    step_s = cluster.step_s(cluster.nodes) * Slowest(straggling, cluster.nodes * cluster.ranks_per_node).mean
    if checkpoints.hidden:
        return max(1, math.ceil(checkpoints.cost_s / cluster.step_s(cluster.nodes)))
    return max(1, round(daly_s(checkpoints.cost_s, failures.mtbf_s / cluster.nodes) / step_s))

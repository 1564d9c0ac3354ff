"""Scenarios for the tests of the simulator, and a slow reference simulation: rank by rank, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    Policy,
    RecoveryModel,
    Scaling,
    SimulatedCluster,
    SimulationScenario,
    Steady,
    Straggling,
    divided_work,
)

HOUR = 3600.0


def scenario(
    policy: Policy = "restart",
    nodes: int = 8,
    step_s: float = 1.0,
    scaling: Scaling = "strong",
    straggling: Straggling | None = None,
    hours: float = 24.0,
    **more: Any,
) -> SimulationScenario:
    """Return a scenario of eight nodes for a day, by default without faults."""
    cluster = {name: more.pop(name) for name in ("ranks_per_node", "min_nodes", "spares") if name in more}
    times = {"detect_s": 20.0, "restart_s": 60.0, "regroup_s": 1.0, "rejoin_s": 10.0, "repair_s": 600.0}
    times |= {name: more.pop(name) for name in times if name in more}
    result = SimulationScenario(
        cluster=SimulatedCluster(nodes, divided_work(step_s, nodes, scaling), 1000.0, scaling=scaling, **cluster),
        failures=Failures(more.pop("mtbf_s", math.inf), more.pop("all_share", 0.0)),
        recovery=RecoveryModel(policy, **times),
        checkpoints=Checkpoints(more.pop("every", 600), more.pop("cost_s", 5.0), more.pop("hidden", False)),
        horizon_s=hours * HOUR,
        straggling=straggling or Steady(),
    )
    assert not more, f"unknown arguments: {more}"
    return result


@dataclass
class StepwiseSimulation:
    """Simulate a training that restarts and whose nodes are replaced at once; every rank of every step is drawn."""

    scenario: SimulationScenario
    sigma: float
    random: np.random.Generator

    def steps(self) -> int:
        """Return the steps that count at the end of the time."""
        plan, recovery, cluster = self.scenario.checkpoints, self.scenario.recovery, self.scenario.cluster
        now_s, done, saved = 0.0, 0, 0
        fails_at = self._next_failure(0.0)
        while now_s < self.scenario.horizon_s:
            ranks = np.exp(self.sigma * self.random.normal(size=cluster.nodes * cluster.ranks_per_node))
            end_s = now_s + cluster.step_s(cluster.nodes) * float(ranks.max())
            is_due = plan.every is not None and (done + 1) % plan.every == 0
            end_s += plan.cost_s if is_due else 0.0
            if fails_at < end_s:
                now_s = fails_at + recovery.detect_s + recovery.restart_s
                done, fails_at = saved, self._next_failure(now_s)
                continue
            now_s = end_s
            if now_s <= self.scenario.horizon_s:
                done += 1
                saved = done if is_due else saved
        return done

    def _next_failure(self, now_s: float) -> float:
        return now_s + float(self.random.exponential(self.scenario.failures.mtbf_s / self.scenario.cluster.nodes))

"""Where the time of a simulated training went: stretches of steps that count so far, and pauses by cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shoal.cost.simulate.scenario import Cluster
from shoal.cost.simulate.straggling import Floats

Pause = Literal["checkpointing", "detection", "recovery", "waiting"]
Cause = Literal["straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting"]

CAUSES: tuple[Cause, ...] = ("straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting")
"""`reduced`: what steps of a smaller cluster take longer (strong) or bring less (weak). `recovery`: restart, regroup,
copying state. `redone`: steps and parts of steps that a failure undid."""

_TINY = 1e-9


@dataclass(frozen=True)
class Leg:
    """Steps at one pace on one number of nodes; undisturbed they would take `step_s` each. `steps` need not be whole;
    pauses for checkpoints lie within."""

    start_s: float
    end_s: float
    first: float
    steps: float
    step_s: float
    pace_s: float
    nodes: int

    @property
    def last(self) -> float:
        return self.first + self.steps

    def cut(self, steps: float) -> Leg:
        end_s = self.start_s + (self.end_s - self.start_s) * steps / self.steps
        return replace(self, steps=steps, end_s=end_s)


class Ledger:
    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.paused: dict[Pause, float] = {"checkpointing": 0.0, "detection": 0.0, "recovery": 0.0, "waiting": 0.0}
        self.redone_s = 0.0

    @property
    def position(self) -> float:
        """Steps that count so far."""
        return self.legs[-1].last if self.legs else 0.0

    def train(self, leg: Leg) -> None:
        if leg.steps > 0:
            self.legs.append(leg)

    def pause(self, cause: Pause, seconds: float) -> None:
        self.paused[cause] += seconds

    def roll_back(self, to: float) -> None:
        """Undoes what came after step `to`."""
        while self.legs and self.legs[-1].last > to:
            leg = self.legs.pop()
            kept = to - leg.first
            if kept > _TINY:
                self.legs.append(leg.cut(kept))
                self.redone_s += (leg.steps - kept) * leg.pace_s
                return
            self.redone_s += leg.steps * leg.pace_s

    def position_at(self, time_s: float) -> float:
        for leg in reversed(self.legs):
            if leg.start_s <= time_s:
                part = min(1.0, (time_s - leg.start_s) / (leg.end_s - leg.start_s))
                return leg.first + part * leg.steps
        return 0.0

    def useful_s(self, cluster: Cluster) -> float:
        """What the steps that count would have taken the undisturbed whole cluster."""
        return sum(self._tokens(cluster)) / cluster.ideal_tokens_per_s

    def lost_s(self, cluster: Cluster) -> dict[Cause, float]:
        """By cause. With `useful_s` they add up to the wall time. Two can be below zero: `straggling` of few steps that
        happened to be quick, `reduced` where fewer nodes are faster."""
        undisturbed_s = sum(leg.steps * leg.step_s for leg in self.legs)
        trained_s = sum(leg.steps * leg.pace_s for leg in self.legs)
        reduced_s = undisturbed_s - self.useful_s(cluster)
        return {
            "straggling": trained_s - undisturbed_s,
            "reduced": reduced_s,
            "checkpointing": self.paused["checkpointing"],
            "detection": self.paused["detection"],
            "recovery": self.paused["recovery"],
            "redone": self.redone_s,
            "waiting": self.paused["waiting"],
        }

    def tokens(self, cluster: Cluster) -> float:
        return sum(self._tokens(cluster))

    def tokens_per_s(self, cluster: Cluster, edges_s: Floats) -> Floats:
        """Between each two edges; tokens of steps that were undone count only where they were redone."""
        if not self.legs:
            return np.zeros(len(edges_s) - 1)
        times = np.array([time for leg in self.legs for time in (leg.start_s, leg.end_s)])
        gained = np.cumsum([tokens for each in self._tokens(cluster) for tokens in (0.0, each)])
        rates: Floats = np.diff(np.interp(edges_s, times, gained)) / np.diff(edges_s)
        return rates

    def _tokens(self, cluster: Cluster) -> list[float]:
        return [leg.steps * cluster.tokens(leg.nodes) for leg in self.legs]

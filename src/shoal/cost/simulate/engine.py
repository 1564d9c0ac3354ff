"""One training, event by event: a node fails, a node comes back, time is up. In between, many steps at once.

Failures are exponential, so they have no memory: the next one may be drawn anew whenever the number of nodes changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from shoal.cost.simulate.ledger import Ledger, Leg, Pause
from shoal.cost.simulate.scenario import Scenario
from shoal.cost.simulate.straggling import Slowest
from shoal.cost.simulate.stretch import Rhythm, whole


class Paces:
    """Step times by number of nodes; shared by all seeds of a scenario, because a table takes a moment to make."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._known: dict[int, tuple[float, Slowest]] = {}

    def of(self, nodes: int) -> tuple[float, Slowest]:
        """The undisturbed step and the slowest rank's factor on it."""
        if nodes not in self._known:
            cluster = self._scenario.cluster
            slowest = Slowest(self._scenario.straggling, nodes * cluster.ranks_per_node)
            self._known[nodes] = (cluster.step_s(nodes), slowest)
        return self._known[nodes]

    def draw(self, random: np.random.Generator, nodes: int, span_s: float) -> tuple[float, float]:
        """The undisturbed step, and the mean one over about so many seconds."""
        step_s, slowest = self.of(nodes)
        return step_s, step_s * slowest.draw_mean(random, round(span_s / (step_s * slowest.mean)))


class Training:
    def __init__(self, scenario: Scenario, paces: Paces, seed: Sequence[int]) -> None:
        self._scenario, self._paces = scenario, paces
        # Apart, so that stragglers do not move the failures: two scenarios that differ in them alone share the rest.
        self._faults, self._strays = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
        self.ledger = Ledger()
        self.failures = 0
        self._now_s = 0.0
        self._nodes = scenario.cluster.nodes
        self._spares = scenario.cluster.spares
        self._repaired_at: list[float] = []
        self._saved = 0.0
        self._owed_s = 0.0
        # Nobody has the state in memory: it comes from the checkpoint. Somebody new has it to copy.
        self._cold = False
        self._joined = False

    def run(self) -> None:
        while self._time_left():
            fails_at, back_at = self._next_failure(), self._next_return()
            until_s = min(fails_at, back_at, self._scenario.horizon_s)
            self._train(until_s)
            if until_s == fails_at:
                self._fall()
                self._recover(seen=False)
            elif until_s == back_at and self._come_back():
                self._take_in()

    # Steps

    def _train(self, until_s: float) -> None:
        span_s = until_s - self._now_s
        if span_s <= 0:
            return
        step_s, pace_s = self._paces.draw(self._strays, self._nodes, span_s)
        steps = self._advance(pace_s, span_s)
        self.ledger.train(Leg(self._now_s, until_s, self.ledger.position, steps, step_s, pace_s, self._nodes))
        self._now_s = until_s

    def _advance(self, pace_s: float, span_s: float) -> float:
        """How many steps fit beside the checkpoints, which are paid for here."""
        checkpoints = self._scenario.checkpoints
        if checkpoints.every is None or checkpoints.hidden:
            return span_s / pace_s
        rhythm = Rhythm(pace_s, checkpoints.every, checkpoints.cost_s)
        stretch = rhythm.advance(self.ledger.position, self._owed_s, span_s)
        self.ledger.pause("checkpointing", stretch.paused_s)
        self._owed_s = stretch.owed_s
        if stretch.saved is not None:
            self._saved = stretch.saved
        return stretch.steps

    # Failures

    def _next_failure(self) -> float:
        rate = self._nodes / self._scenario.failures.mtbf_s
        return self._now_s + float(self._faults.exponential(1 / rate)) if rate > 0 else math.inf

    def _next_return(self) -> float:
        return self._repaired_at[0] if self._repaired_at else math.inf

    def _fall(self) -> None:
        self.failures += 1
        everybody = self._faults.random() < self._scenario.failures.all_share
        if not everybody:
            self._nodes -= 1
            heapq.heappush(self._repaired_at, self._now_s + self._scenario.recovery.repair_s)
        if everybody or self._nodes == 0 or self._scenario.recovery.policy == "restart":
            self._go_back()
        else:
            self.ledger.roll_back(whole(self.ledger.position))
            if self._owed_s:
                self._owed_s = self._scenario.checkpoints.cost_s

    def _go_back(self) -> None:
        """To the last whole checkpoint."""
        checkpoints = self._scenario.checkpoints
        if checkpoints.hidden and checkpoints.every is not None:
            written = self.ledger.position_at(self._now_s - checkpoints.cost_s)
            self._saved = max(self._saved, whole(written, checkpoints.every))
        self.ledger.roll_back(self._saved)
        self._owed_s, self._cold = 0.0, True

    def _recover(self, seen: bool) -> None:
        """Until training can go on. Another failure on the way has to be detected too, and begins it again."""
        while self._time_left():
            if (seen or self._pause("detection", self._scenario.recovery.detect_s)) and self._assemble():
                done = self._pause("recovery", self._recovery_s())
                if done:
                    self._cold = self._joined = False
                    return
            seen = False

    def _recovery_s(self) -> float:
        recovery = self._scenario.recovery
        if self._cold:
            return recovery.restart_s
        return recovery.regroup_s + (recovery.rejoin_s if self._joined else 0.0)

    # Members

    def _assemble(self) -> bool:
        """Spares step in; then everybody waits for enough nodes. False: another node failed meanwhile."""
        taken = min(self._spares, self._scenario.cluster.nodes - self._nodes)
        if taken:
            self._spares -= taken
            self._nodes += taken
            self._joined = True
        while self._nodes < self._scenario.cluster.min_nodes and self._time_left():
            if not self._pause("waiting", self._next_return() - self._now_s):
                return False
        return True

    def _come_back(self) -> bool:
        """Whether the node that was repaired takes part; otherwise it is a spare."""
        heapq.heappop(self._repaired_at)
        if self._nodes == self._scenario.cluster.nodes:
            self._spares += 1
            return False
        self._nodes += 1
        self._joined = True
        return True

    def _take_in(self) -> None:
        if self._scenario.recovery.policy == "restart":
            self._go_back()
        self._recover(seen=True)

    # Time

    def _time_left(self) -> bool:
        return self._now_s < self._scenario.horizon_s

    def _pause(self, cause: Pause, seconds: float) -> bool:
        """False: a node failed before it was over. Who is repaired meanwhile joins in."""
        end_s = min(self._now_s + seconds, self._scenario.horizon_s)
        while self._now_s < end_s:
            fails_at, back_at = self._next_failure(), self._next_return()
            until_s = min(fails_at, back_at, end_s)
            self.ledger.pause(cause, until_s - self._now_s)
            self._now_s = until_s
            if until_s == fails_at:
                self._fall()
                return False
            if until_s == back_at:
                self._come_back()
        return True

"""Simulate a training event by event: a node fails, a node returns, time is up. In between, many steps at once.

Failures are exponential and have no memory, so the next one may be drawn again whenever the number of nodes changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shoal.errors import ConfigError
from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    Floats,
    SimulatedCluster,
    SimulationScenario,
    Slowest,
    Straggling,
)

Pause = Literal["checkpointing", "detection", "recovery", "waiting"]
# `reduced`: what steps of a smaller cluster take longer (strong) or bring less (weak). `recovery`: restart, regroup,
# copying state. `redone`: steps and parts of steps that a failure undid.
Cause = Literal["straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting"]
CAUSES: tuple[Cause, ...] = ("straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting")

BINS = 96
_QUANTILES = (0.05, 0.5, 0.95)
_TINY = 1e-9


# The forecast over many seeds


@dataclass(frozen=True)
class Band:
    """The median, and the 5th and 95th percentile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class SeedResult:
    wall_s: float
    useful_s: float
    lost_s: dict[Cause, float]
    tokens: float
    steps: int
    failures: int
    tokens_per_s: Floats

    @property
    def goodput(self) -> float:
        """The fraction of the wall time that went into steps that counted, however slow they were."""
        return (self.useful_s + self.lost_s["straggling"] + self.lost_s["reduced"]) / self.wall_s

    @property
    def of_ideal(self) -> float:
        """Tokens relative to those of an undisturbed cluster."""
        return self.useful_s / self.wall_s


@dataclass(frozen=True)
class Forecast:
    scenario: SimulationScenario
    seeds: int
    goodput: Band
    of_ideal: Band
    tokens: Band
    failures: Band
    lost_s: dict[Cause, Band]
    # Useful and lost seconds, mean over the seeds: unlike medians they add up to the wall time.
    mean_s: dict[str, float]
    edges_s: Floats
    # Low, median and high between each two edges.
    tokens_per_s: tuple[Floats, Floats, Floats]


def simulate(scenario: SimulationScenario, seeds: int = 20, seed: int = 0, bins: int = BINS) -> Forecast:
    if seeds < 1:
        raise ConfigError(
            f"{seeds} seeds give no forecast", why="at least one training is simulated", fix="for example: seeds = 20"
        )
    if seed < 0:
        raise ConfigError(
            f"{seed} is not a seed", why="seeds of random numbers are zero or above", fix="for example: seed = 0"
        )
    results = simulate_seeds(scenario, seeds, seed, bins)
    low, median, high = np.quantile([result.tokens_per_s for result in results], _QUANTILES, axis=0)
    lost = {cause: [result.lost_s[cause] for result in results] for cause in CAUSES}
    useful_s = float(np.mean([result.useful_s for result in results]))
    return Forecast(
        scenario=scenario,
        seeds=seeds,
        goodput=band([result.goodput for result in results]),
        of_ideal=band([result.of_ideal for result in results]),
        tokens=band([result.tokens for result in results]),
        failures=band([float(result.failures) for result in results]),
        lost_s={cause: band(seconds) for cause, seconds in lost.items()},
        mean_s={"useful": useful_s, **{cause: float(np.mean(seconds)) for cause, seconds in lost.items()}},
        edges_s=_edges(scenario, bins),
        tokens_per_s=(low, median, high),
    )


def simulate_seeds(scenario: SimulationScenario, seeds: int, seed: int, bins: int = BINS) -> list[SeedResult]:
    step_times = StepTimes(scenario)
    return [_simulate_seed(scenario, step_times, (seed, number), bins) for number in range(seeds)]


def _simulate_seed(scenario: SimulationScenario, step_times: StepTimes, seed: tuple[int, int], bins: int) -> SeedResult:
    training = SimulatedTraining(scenario, step_times, seed)
    training.run()
    ledger, cluster = training.ledger, scenario.cluster
    return SeedResult(
        wall_s=scenario.horizon_s,
        useful_s=ledger.useful_s(cluster),
        lost_s=ledger.lost_s(cluster),
        tokens=ledger.tokens(cluster),
        steps=int(ledger.position),
        failures=training.failures,
        tokens_per_s=ledger.tokens_per_s(cluster, _edges(scenario, bins)),
    )


def band(values: list[float]) -> Band:
    low, median, high = np.quantile(values, _QUANTILES)
    return Band(float(low), float(median), float(high))


def _edges(scenario: SimulationScenario, bins: int) -> Floats:
    return np.linspace(0.0, scenario.horizon_s, bins + 1)


# One training


class StepTimes:
    """Step times by number of nodes, shared by all seeds of a scenario, because a table takes a moment to make."""

    def __init__(self, scenario: SimulationScenario) -> None:
        self._scenario = scenario
        self._known: dict[int, tuple[float, Slowest]] = {}

    def draw(self, random: np.random.Generator, nodes: int, span_s: float) -> tuple[float, float]:
        """Return the undisturbed step, and the mean step over about `span_s` seconds."""
        if nodes not in self._known:
            cluster = self._scenario.cluster
            slowest = Slowest(self._scenario.straggling, nodes * cluster.ranks_per_node)
            self._known[nodes] = (cluster.step_s(nodes), slowest)
        step_s, slowest = self._known[nodes]
        return step_s, step_s * slowest.draw_mean(random, round(span_s / (step_s * slowest.mean)))


class SimulatedTraining:
    def __init__(self, scenario: SimulationScenario, step_times: StepTimes, seed: Sequence[int]) -> None:
        self._scenario, self._step_times = scenario, step_times
        # Separate generators: two scenarios that differ only in stragglers have the same failures.
        self._failure_random, self._straggler_random = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
        self.ledger = TimeLedger()
        self.failures = 0
        self._now_s = 0.0
        self._nodes = scenario.cluster.nodes
        self._spares = scenario.cluster.spares
        self._repaired_at: list[float] = []
        self._saved_step = 0.0
        self._owed_s = 0.0  # of the pause for the last checkpoint
        self._needs_checkpoint = False  # no node has the state in memory
        self._has_new_node = False  # which must copy the state

    def run(self) -> None:
        while self._has_time():
            fails_at, returns_at = self._next_failure(), self._next_return()
            until_s = min(fails_at, returns_at, self._scenario.horizon_s)
            self._train(until_s)
            if until_s == fails_at:
                self._fail()
                self._recover(is_detected=False)
            elif until_s == returns_at and self._return_node():
                if self._scenario.recovery.policy == "restart":
                    self._go_back_to_checkpoint()
                self._recover(is_detected=True)

    def _train(self, until_s: float) -> None:
        span_s = until_s - self._now_s
        if span_s <= 0:
            return
        step_s, pace_s = self._step_times.draw(self._straggler_random, self._nodes, span_s)
        steps = self._advance(pace_s, span_s)
        self.ledger.train(Leg(self._now_s, until_s, self.ledger.position, steps, step_s, pace_s, self._nodes))
        self._now_s = until_s

    def _advance(self, pace_s: float, span_s: float) -> float:
        """Return how many steps fit besides the checkpoints, and account for those."""
        checkpoints = self._scenario.checkpoints
        if checkpoints.every is None or checkpoints.hidden:
            return span_s / pace_s
        rhythm = Rhythm(pace_s, checkpoints.every, checkpoints.cost_s)
        stretch = rhythm.advance(self.ledger.position, self._owed_s, span_s)
        self.ledger.pause("checkpointing", stretch.paused_s)
        self._owed_s = stretch.owed_s
        if stretch.saved is not None:
            self._saved_step = stretch.saved
        return stretch.steps

    def _next_failure(self) -> float:
        rate = self._nodes / self._scenario.failures.mtbf_s
        return self._now_s + float(self._failure_random.exponential(1 / rate)) if rate > 0 else math.inf

    def _next_return(self) -> float:
        return self._repaired_at[0] if self._repaired_at else math.inf

    def _fail(self) -> None:
        self.failures += 1
        hits_all = self._failure_random.random() < self._scenario.failures.all_share
        if not hits_all:
            self._nodes -= 1
            heapq.heappush(self._repaired_at, self._now_s + self._scenario.recovery.repair_s)
        if hits_all or self._nodes == 0 or self._scenario.recovery.policy == "restart":
            self._go_back_to_checkpoint()
        else:
            self.ledger.roll_back(last_multiple(self.ledger.position))
            if self._owed_s:
                self._owed_s = self._scenario.checkpoints.cost_s

    def _go_back_to_checkpoint(self) -> None:
        checkpoints = self._scenario.checkpoints
        if checkpoints.hidden and checkpoints.every is not None:
            written = self.ledger.position_at(self._now_s - checkpoints.cost_s)
            self._saved_step = max(self._saved_step, last_multiple(written, checkpoints.every))
        self.ledger.roll_back(self._saved_step)
        self._owed_s, self._needs_checkpoint = 0.0, True

    def _recover(self, is_detected: bool) -> None:
        """Pause until training can continue. A failure meanwhile must be detected too, and recovery starts again."""
        recovery = self._scenario.recovery
        while self._has_time():
            if (is_detected or self._pause("detection", recovery.detect_s)) and self._assemble():
                recovery_s = recovery.regroup_s + (recovery.rejoin_s if self._has_new_node else 0.0)
                if self._pause("recovery", recovery.restart_s if self._needs_checkpoint else recovery_s):
                    self._needs_checkpoint = self._has_new_node = False
                    return
            is_detected = False

    def _assemble(self) -> bool:
        """Use spares, then wait for enough nodes. Return False if another node failed meanwhile."""
        taken = min(self._spares, self._scenario.cluster.nodes - self._nodes)
        if taken:
            self._spares -= taken
            self._nodes += taken
            self._has_new_node = True
        while self._nodes < self._scenario.cluster.min_nodes and self._has_time():
            if not self._pause("waiting", self._next_return() - self._now_s):
                return False
        return True

    def _return_node(self) -> bool:
        """Return whether the repaired node takes part; otherwise it becomes a spare."""
        heapq.heappop(self._repaired_at)
        if self._nodes == self._scenario.cluster.nodes:
            self._spares += 1
            return False
        self._nodes += 1
        self._has_new_node = True
        return True

    def _has_time(self) -> bool:
        return self._now_s < self._scenario.horizon_s

    def _pause(self, cause: Pause, seconds: float) -> bool:
        """Pause; nodes that are repaired meanwhile join. Return False if a node failed before the pause was over."""
        end_s = min(self._now_s + seconds, self._scenario.horizon_s)
        while self._now_s < end_s:
            fails_at, returns_at = self._next_failure(), self._next_return()
            until_s = min(fails_at, returns_at, end_s)
            self.ledger.pause(cause, until_s - self._now_s)
            self._now_s = until_s
            if until_s == fails_at:
                self._fail()
                return False
            if until_s == returns_at:
                self._return_node()
        return True


# Many steps at once: steps and checkpoints between two events


@dataclass(frozen=True)
class TrainingStretch:
    steps: float
    paused_s: float
    owed_s: float  # of the pause for the last checkpoint, still to come
    saved: float | None  # the step of the last complete checkpoint


@dataclass(frozen=True)
class Rhythm:
    """Steps, and a pause after every few of them."""

    step_s: float
    every: int
    pause_s: float

    def advance(self, position: float, owed_s: float, span_s: float) -> TrainingStretch:
        """Train for `span_s` from step `position` on; `owed_s` of that step's checkpoint are still to be paid."""
        paid_s = min(owed_s, span_s)
        if paid_s < owed_s:
            return TrainingStretch(0.0, paid_s, owed_s - paid_s, None)
        saved = position if owed_s > 0 else None
        first = last_multiple(position, self.every) + self.every - position
        left_s = span_s - paid_s - first * self.step_s
        if left_s < -_TINY * self.step_s:
            return TrainingStretch((span_s - paid_s) / self.step_s, paid_s, 0.0, saved)
        return self._cycles(position + first, TrainingStretch(first, paid_s, 0.0, saved), left_s)

    def _cycles(self, at: float, before: TrainingStretch, left_s: float) -> TrainingStretch:
        """From a due checkpoint on, alternate pause and steps as often as they fit."""
        cycle_s = self.pause_s + self.every * self.step_s
        cycles = max(0, math.floor(left_s / cycle_s))
        left_s = max(0.0, left_s - cycles * cycle_s)
        at += cycles * self.every
        steps = before.steps + cycles * self.every
        paid_s = min(self.pause_s, left_s)
        paused_s = before.paused_s + cycles * self.pause_s + paid_s
        if paid_s < self.pause_s:
            saved = at - self.every if cycles else before.saved
            return TrainingStretch(steps, paused_s, self.pause_s - paid_s, saved)
        return TrainingStretch(steps + (left_s - paid_s) / self.step_s, paused_s, 0.0, at)


def last_multiple(position: float, every: int = 1) -> int:
    """Return the last multiple of `every` up to `position`."""
    return math.floor(position / every + _TINY) * every


# Where the time went


@dataclass(frozen=True)
class Leg:
    """Steps at one pace on one number of nodes; pauses for checkpoints lie within."""

    start_s: float
    end_s: float
    first: float
    steps: float  # need not be whole
    step_s: float  # of an undisturbed step
    pace_s: float  # of a real step
    nodes: int

    @property
    def last(self) -> float:
        return self.first + self.steps

    def cut(self, steps: float) -> Leg:
        end_s = self.start_s + (self.end_s - self.start_s) * steps / self.steps
        return replace(self, steps=steps, end_s=end_s)


class TimeLedger:
    """The steps that count so far, and pauses by cause."""

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.paused: dict[Pause, float] = {"checkpointing": 0.0, "detection": 0.0, "recovery": 0.0, "waiting": 0.0}
        self.redone_s = 0.0

    @property
    def position(self) -> float:
        return self.legs[-1].last if self.legs else 0.0

    def train(self, leg: Leg) -> None:
        if leg.steps > 0:
            self.legs.append(leg)

    def pause(self, cause: Pause, seconds: float) -> None:
        self.paused[cause] += seconds

    def roll_back(self, to: float) -> None:
        """Undo what came after step `to`."""
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
                done = min(1.0, (time_s - leg.start_s) / (leg.end_s - leg.start_s))
                return leg.first + done * leg.steps
        return 0.0

    def tokens(self, cluster: SimulatedCluster) -> float:
        return sum(self._leg_tokens(cluster))

    def useful_s(self, cluster: SimulatedCluster) -> float:
        """Return what the steps that count would have taken on the undisturbed whole cluster."""
        return self.tokens(cluster) / cluster.ideal_tokens_per_s

    def lost_s(self, cluster: SimulatedCluster) -> dict[Cause, float]:
        """Return the lost time by cause; with `useful_s` it adds up to the wall time. Two can be negative: `straggling`
        of few steps that happened to be fast, `reduced` where fewer nodes are faster."""
        undisturbed_s = sum(leg.steps * leg.step_s for leg in self.legs)
        trained_s = sum(leg.steps * leg.pace_s for leg in self.legs)
        return {
            "straggling": trained_s - undisturbed_s,
            "reduced": undisturbed_s - self.useful_s(cluster),
            "checkpointing": self.paused["checkpointing"],
            "detection": self.paused["detection"],
            "recovery": self.paused["recovery"],
            "redone": self.redone_s,
            "waiting": self.paused["waiting"],
        }

    def tokens_per_s(self, cluster: SimulatedCluster, edges_s: Floats) -> Floats:
        """Return the rate between each two edges; tokens of undone steps count only where they were redone."""
        if not self.legs:
            return np.zeros(len(edges_s) - 1)
        times = np.array([time for leg in self.legs for time in (leg.start_s, leg.end_s)])
        gained = np.cumsum([part for tokens in self._leg_tokens(cluster) for part in (0.0, tokens)])
        rates: Floats = np.diff(np.interp(edges_s, times, gained)) / np.diff(edges_s)
        return rates

    def _leg_tokens(self, cluster: SimulatedCluster) -> list[float]:
        return [leg.steps * cluster.tokens(leg.nodes) for leg in self.legs]


# The checkpoint interval, by Young (1974) and Daly (2006): often enough to redo little, rarely enough to cost little


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds between two checkpoints, where any node fails every `mtbf_s`."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval with further terms, which matter where a checkpoint is long relative to `mtbf_s`."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(cost_s / (2 * mtbf_s))
    return young_s(cost_s, mtbf_s) * (1 + root / 3 + root**2 / 9) - cost_s


def best_every(
    cluster: SimulatedCluster, failures: Failures, straggling: Straggling, checkpoints: Checkpoints
) -> int | None:
    """Return the steps between checkpoints for a training that restarts from them; None: nothing fails, write none.

    A hidden checkpoint costs no time, so it is written as often as possible.
    """
    if math.isinf(failures.mtbf_s):
        return None
    step_s = cluster.step_s(cluster.nodes)
    if checkpoints.hidden:
        return max(1, math.ceil(checkpoints.cost_s / step_s))
    step_s *= Slowest(straggling, cluster.nodes * cluster.ranks_per_node).mean
    return max(1, round(daly_s(checkpoints.cost_s, failures.mtbf_s / cluster.nodes) / step_s))

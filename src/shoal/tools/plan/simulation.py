"""One training, event by event: a node fails, a node comes back, time is up. In between, many steps at once.

Failures are exponential, so they have no memory: the next one may be drawn anew whenever the number of nodes changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shoal.cost.network import ring_bytes
from shoal.errors import ConfigError
from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    Floats,
    Lognormal,
    RecoveryModel,
    SimulatedCluster,
    SimulationScenario,
    Slowest,
    Steady,
    Straggling,
    divided_work,
)

# SECTION cost/simulate/stretch
# Many steps at once: what happens between two events, when nothing but steps and checkpoints does.


_TINY = 1e-9


@dataclass(frozen=True)
class TrainingStretch:
    """`owed_s` of the pause for the last checkpoint are still to come; `saved` is the step of the last whole one."""

    steps: float
    paused_s: float
    owed_s: float
    saved: float | None


@dataclass(frozen=True)
class Rhythm:
    """A step after another, and a pause after every so many."""

    step_s: float
    every: int
    pause_s: float

    def advance(self, position: float, owed_s: float, span_s: float) -> TrainingStretch:
        """`span_s` from step `position` on, of whose checkpoint `owed_s` are still to be paid."""
        paid_s = min(owed_s, span_s)
        if paid_s < owed_s:
            return TrainingStretch(0.0, paid_s, owed_s - paid_s, None)
        saved = position if owed_s > 0 else None
        first = next_multiple(position, self.every) - position
        left_s = span_s - paid_s - first * self.step_s
        if left_s < -_TINY * self.step_s:
            return TrainingStretch((span_s - paid_s) / self.step_s, paid_s, 0.0, saved)
        return self._cycles(position + first, TrainingStretch(first, paid_s, 0.0, saved), left_s)

    def _cycles(self, at: float, before: TrainingStretch, left_s: float) -> TrainingStretch:
        """From a checkpoint that is due: pause and steps in turn, as often as they fit."""
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


def next_multiple(position: float, every: int) -> int:
    """The first one after `position`."""
    return (math.floor(position / every + _TINY) + 1) * every


def whole(position: float, every: int = 1) -> int:
    """The last one up to `position`."""
    return math.floor(position / every + _TINY) * every


# SECTION cost/simulate/ledger
# Where the time of a simulated training went: stretches of steps that count so far, and pauses by cause.


Pause = Literal["checkpointing", "detection", "recovery", "waiting"]
Cause = Literal["straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting"]

CAUSES: tuple[Cause, ...] = ("straggling", "reduced", "checkpointing", "detection", "recovery", "redone", "waiting")
"""`reduced`: what steps of a smaller cluster take longer (strong) or bring less (weak). `recovery`: restart, regroup,
copying state. `redone`: steps and parts of steps that a failure undid."""


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


class TimeLedger:
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

    def useful_s(self, cluster: SimulatedCluster) -> float:
        """What the steps that count would have taken the undisturbed whole cluster."""
        return sum(self._tokens(cluster)) / cluster.ideal_tokens_per_s

    def lost_s(self, cluster: SimulatedCluster) -> dict[Cause, float]:
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

    def tokens(self, cluster: SimulatedCluster) -> float:
        return sum(self._tokens(cluster))

    def tokens_per_s(self, cluster: SimulatedCluster, edges_s: Floats) -> Floats:
        """Between each two edges; tokens of steps that were undone count only where they were redone."""
        if not self.legs:
            return np.zeros(len(edges_s) - 1)
        times = np.array([time for leg in self.legs for time in (leg.start_s, leg.end_s)])
        gained = np.cumsum([tokens for each in self._tokens(cluster) for tokens in (0.0, each)])
        rates: Floats = np.diff(np.interp(edges_s, times, gained)) / np.diff(edges_s)
        return rates

    def _tokens(self, cluster: SimulatedCluster) -> list[float]:
        return [leg.steps * cluster.tokens(leg.nodes) for leg in self.legs]


class Paces:
    """Step times by number of nodes; shared by all seeds of a scenario, because a table takes a moment to make."""

    def __init__(self, scenario: SimulationScenario) -> None:
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


class SimulatedTraining:
    def __init__(self, scenario: SimulationScenario, paces: Paces, seed: Sequence[int]) -> None:
        self._scenario, self._paces = scenario, paces
        # Apart, so that stragglers do not move the failures: two scenarios that differ in them alone share the rest.
        self._faults, self._strays = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
        self.ledger = TimeLedger()
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


# SECTION cost/simulate/interval
# How often to write a checkpoint, by Young (1974) and Daly (2006): often enough to redo little, rarely enough to pay
# little.


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints, for one failure of anything every `mtbf_s`."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Young's with the next terms; it matters where a checkpoint is not short against the time between failures."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = math.sqrt(cost_s / (2 * mtbf_s))
    return young_s(cost_s, mtbf_s) * (1 + part / 3 + part**2 / 9) - cost_s


def best_every(
    cluster: SimulatedCluster, failures: Failures, straggling: Straggling, checkpoints: Checkpoints
) -> int | None:
    """Steps between checkpoints for a training that restarts from them. None: nothing fails, write none.

    A hidden one costs no time, so it is written as often as it can be.
    """
    if math.isinf(failures.mtbf_s):
        return None
    step_s = cluster.step_s(cluster.nodes) * Slowest(straggling, cluster.nodes * cluster.ranks_per_node).mean
    if checkpoints.hidden:
        return max(1, math.ceil(checkpoints.cost_s / cluster.step_s(cluster.nodes)))
    return max(1, round(daly_s(checkpoints.cost_s, failures.mtbf_s / cluster.nodes) / step_s))


# SECTION cost/simulate/forecast
# A scenario over many seeds: the middle, and the band that nine in ten of them lie in.


_BAND = (0.05, 0.5, 0.95)
BINS = 96


@dataclass(frozen=True)
class Band:
    """Median, and from the 5th to the 95th percentile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class SeedResult:
    """One seed."""

    wall_s: float
    useful_s: float
    lost_s: dict[Cause, float]
    tokens: float
    steps: int
    failures: int
    tokens_per_s: Floats

    @property
    def goodput(self) -> float:
        """The part of the wall time that went into steps that counted, however slow they were."""
        return (self.useful_s + self.lost_s["straggling"] + self.lost_s["reduced"]) / self.wall_s

    @property
    def of_ideal(self) -> float:
        """Tokens, against an undisturbed cluster."""
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
    mean_s: dict[str, float]
    """Useful and lost seconds, mean over the seeds: unlike medians they add up to the wall time."""
    edges_s: Floats
    tokens_per_s: tuple[Floats, Floats, Floats]
    """Low, median, high between each two edges."""


def simulate(scenario: SimulationScenario, seeds: int = 20, seed: int = 0, bins: int = BINS) -> Forecast:
    if seeds < 1:
        raise ConfigError(
            f"{seeds} seeds give no forecast", why="at least one training is simulated", fix="for example: --seeds 20"
        )
    if seed < 0:
        raise ConfigError(
            f"{seed} is no seed", why="seeds of random numbers are zero or above", fix="for example: --seed 0"
        )
    outcomes = outcomes_of(scenario, seeds, seed, bins)
    low, median, high = np.quantile([each.tokens_per_s for each in outcomes], _BAND, axis=0)
    lost = {cause: [each.lost_s[cause] for each in outcomes] for cause in CAUSES}
    useful_s = float(np.mean([each.useful_s for each in outcomes]))
    return Forecast(
        scenario=scenario,
        seeds=seeds,
        goodput=band([each.goodput for each in outcomes]),
        of_ideal=band([each.of_ideal for each in outcomes]),
        tokens=band([each.tokens for each in outcomes]),
        failures=band([float(each.failures) for each in outcomes]),
        lost_s={cause: band(seconds) for cause, seconds in lost.items()},
        mean_s={"useful": useful_s, **{cause: float(np.mean(seconds)) for cause, seconds in lost.items()}},
        edges_s=_edges(scenario, bins),
        tokens_per_s=(low, median, high),
    )


def outcomes_of(scenario: SimulationScenario, seeds: int, seed: int, bins: int = BINS) -> list[SeedResult]:
    paces = Paces(scenario)
    return [simulate_once(scenario, paces, (seed, number), bins) for number in range(seeds)]


def simulate_once(scenario: SimulationScenario, paces: Paces, seed: tuple[int, int], bins: int = BINS) -> SeedResult:
    training = SimulatedTraining(scenario, paces, seed)
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
    low, median, high = np.quantile(values, _BAND)
    return Band(float(low), float(median), float(high))


def _edges(scenario: SimulationScenario, bins: int) -> Floats:
    return np.linspace(0.0, scenario.horizon_s, bins + 1)


# SECTION cost/simulate/published
# The simulator against what others measured and published. No constant here was chosen to hit a figure: each is
# published, follows from published ones, or stands in the row's assumptions.
#
# Sources: [L] Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3. [R] Kokolis et al., Revisiting
# Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680, HPCA 2025. [H] Sergeev and Del Balso,
# Horovod, arXiv 1802.05799, and Horovod's docs/benchmarks.rst. [T] TensorFlow benchmarks of May 2017, tensorflow/docs
# site/en/r1/guide/performance/benchmarks.md. [D] Li et al., PyTorch Distributed, arXiv 2006.15704, VLDB 2020. [N] He et
# al., Deep Residual Learning, arXiv 1512.03385, table 1.


HOUR = 3600.0
DAY = 24 * HOUR
GPUS_PER_NODE = 8

# [L]: 54 days, 16,384 GPUs, 419 unexpected interruptions, above 90% effective time.
LLAMA_GPUS, LLAMA_DAYS, LLAMA_INTERRUPTIONS = 16_384, 54, 419
# [L]: 405e9 parameters, 16M tokens a step, about 400 TFLOP/s a GPU; six operations a parameter and token.
LLAMA_PARAMETERS, LLAMA_STEP_TOKENS, LLAMA_FLOPS = 405e9, 16e6, 400e12
LLAMA_STEP_S = 6 * LLAMA_PARAMETERS * LLAMA_STEP_TOKENS / (LLAMA_GPUS * LLAMA_FLOPS)
# bf16 weights and fp32 weights and moments, at the storage's sustained 2 TB/s [L].
LLAMA_CHECKPOINT_S = LLAMA_PARAMETERS * 14 / 2e12
# [L]: the cluster had 24K GPUs, 16K of which took part.
LLAMA_SPARES = (24_000 - LLAMA_GPUS) // GPUS_PER_NODE
# [R]: measured 7.9 h at 1,024 GPUs and 47.7 days at 8; projected from 6.50 failures in 1,000 node-days: the others.
MEASURED_MTTF_H = {8: 47.7 * 24, 1024: 7.9}
PROJECTED_MTTF_H = {16_384: 1.8, 131_072: 0.23}
PROJECTED_FROM = 6.5e-3 / DAY
# [T]: images a second of one P100, batch 64, synthetic. ResNet-101 lies between ResNet-50 (219) and -152 (91.8) as its
# operations do [N]: 7.6 between 3.8 and 11.3.
P100_S = {
    "Inception V3": 64 / 142,
    "ResNet-101": 64 * (1 / 219 + (7.6 - 3.8) / (11.3 - 3.8) * (1 / 91.8 - 1 / 219)),
    "VGG-16": 64 / 154,
}
PARAMETERS = {"Inception V3": 23.8e6, "ResNet-101": 44.5e6, "VGG-16": 138.4e6, "ResNet-50": 25.6e6}
HOROVOD = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
# Backward does twice the work of forward, and only backward can hide an exchange.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class SimulationRow:
    what: str
    source: str
    published: str
    simulated: str
    assumptions: str = ""

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def validation(seeds: int = 20) -> list[SimulationRow]:
    return [*_llama_rows(seeds), *_reliability_rows(seeds), *_horovod_rows(), *_ddp_rows()]


# Failures


def llama(mtbf_s: float, down_s: float, seeds: int = 20) -> Forecast:
    """`down_s` from a failure to the next step, which nobody published."""
    nodes = LLAMA_GPUS // GPUS_PER_NODE
    cluster = SimulatedCluster(
        nodes, divided_work(LLAMA_STEP_S, nodes, "strong"), LLAMA_STEP_TOKENS, GPUS_PER_NODE, spares=LLAMA_SPARES
    )
    checkpoints, failures = Checkpoints(1, LLAMA_CHECKPOINT_S), Failures(mtbf_s)
    every = best_every(cluster, failures, Steady(), checkpoints)
    recovery = RecoveryModel("restart", 0.0, down_s, 0.0, 0.0, repair_s=DAY)
    world = SimulationScenario(cluster, failures, recovery, Checkpoints(every, LLAMA_CHECKPOINT_S), LLAMA_DAYS * DAY)
    return simulate(world, seeds)


def llama_mtbf_s() -> float:
    """Of a node, from the interruptions themselves."""
    return LLAMA_DAYS * DAY * (LLAMA_GPUS // GPUS_PER_NODE) / LLAMA_INTERRUPTIONS


def mttf_h(gpus: int, node_rate: float, seeds: int = 20) -> float:
    """The simulator's mean time to failure of a whole job, from about 200 failures a seed."""
    nodes = max(1, gpus // GPUS_PER_NODE)
    horizon_s = 200 / (nodes * node_rate)
    cluster = SimulatedCluster(nodes, divided_work(60.0, nodes, "strong"), 1.0, GPUS_PER_NODE, spares=nodes)
    recovery = RecoveryModel("restart", 0.0, 0.0, 0.0, 0.0, 0.0)
    found = simulate(
        SimulationScenario(cluster, Failures(1 / node_rate), recovery, Checkpoints(None, 0.0), horizon_s), seeds
    )
    return horizon_s / found.failures.median / HOUR


def _llama_rows(seeds: int) -> list[SimulationRow]:
    own, other = llama(llama_mtbf_s(), 600.0, seeds), llama(1 / PROJECTED_FROM, 600.0, seeds)
    known = "node MTBF of 264 days from the 419 themselves: says only that the engine draws what it is told"
    rows = [
        SimulationRow("interruptions, 16,384 GPUs, 54 days", "[L]", "419", _span(own, "failures"), known),
        SimulationRow(
            "the same, foretold", "[L]", "419", _span(other, "failures"), "the rate of another cluster, from [R]"
        ),
    ]
    for minutes in (5, 10, 15, 20):
        found = llama(llama_mtbf_s(), 60.0 * minutes, seeds)
        text = f"{minutes} min from failure to next step; checkpoints of 2.8 s at Daly's interval"
        rows.append(SimulationRow("effective time, the same", "[L]", "> 90%", _span(found, "goodput"), text))
    return rows


def _reliability_rows(seeds: int) -> list[SimulationRow]:
    measured = 1 / (MEASURED_MTTF_H[1024] * HOUR * 128)
    rows = [
        _mttf_row(gpus, hours, measured, "node MTBF of 1,011 h, from the 7.9 h", seeds)
        for gpus, hours in MEASURED_MTTF_H.items()
    ]
    rows += [
        _mttf_row(gpus, hours, PROJECTED_FROM, "6.50 failures in 1,000 node-days", seeds)
        for gpus, hours in PROJECTED_MTTF_H.items()
    ]
    clash = "the same rate: measured and projected figures of [R] do not lie on one line"
    return [*rows, _mttf_row(1024, MEASURED_MTTF_H[1024], PROJECTED_FROM, clash, seeds)]


def _mttf_row(gpus: int, published_h: float, rate: float, assumptions: str, seeds: int) -> SimulationRow:
    what = f"mean time to failure, {gpus:,} GPUs"
    return SimulationRow(what, "[R]", _hours(published_h), _hours(mttf_h(gpus, rate, seeds)), assumptions)


# Communication


def exchange_s(model: str, ranks: int, link_gbps: float) -> float:
    """A ring all-reduce of fp32 gradients; each machine's link carries the ring once, however many ranks it has."""
    return 8e-9 * ring_bytes(ranks, round(4 * PARAMETERS[model])) / link_gbps


def efficiency(compute_s: float, exposed_s: float) -> float:
    return compute_s / (compute_s + exposed_s)


def bounds(compute_s: float, exchanged_s: float) -> tuple[float, float]:
    """Nothing of the exchange hidden, and as much as backward can hide."""
    return efficiency(compute_s, exchanged_s), efficiency(compute_s, max(0.0, exchanged_s - BACKWARD * compute_s))


def hidden_part(model: str) -> float:
    """Of the exchange, if the published efficiency is right."""
    exposed_s = P100_S[model] * (1 / HOROVOD[model] - 1)
    return 1 - exposed_s / exchange_s(model, 512, 25)


def _horovod_rows() -> list[SimulationRow]:
    hidden = hidden_part("VGG-16")
    rows = []
    for model, published in HOROVOD.items():
        exchanged_s = exchange_s(model, 512, 25)
        low, high = bounds(P100_S[model], exchanged_s)
        rows.append(
            SimulationRow(
                f"efficiency of {model}, 512 GPUs",
                "[H]",
                f"{published:.0%}",
                f"{low:.0%}–{high:.0%}",
                "P100 speeds of [T]; 25 Gbit/s a server at full rate; nothing hidden – all that backward can hide",
            )
        )
        if model != "VGG-16":
            found = efficiency(P100_S[model], (1 - hidden) * exchanged_s)
            text = f"hidden part of {hidden:.0%} taken from VGG-16's 68%"
            rows.append(
                SimulationRow(f"the same, {model} from VGG-16", "[H]", f"{published:.0%}", f"{found:.0%}", text)
            )
    return rows


def _ddp_rows() -> list[SimulationRow]:
    compute_s = 64 / (219 * 15.7 / 10.6)
    low, high = bounds(compute_s, exchange_s("ResNet-50", 256, 100))
    text = "P100's 219 images/s [T] times fp32 peaks 15.7 ÷ 10.6 for a V100, batch 64; 100 Gbit/s a server"
    rows = [SimulationRow("efficiency of ResNet-50, 256 GPUs", "[D]", "near-linear", f"{low:.0%}–{high:.0%}", text)]
    for sigma in (0.01, 0.03):
        found = 1 / Slowest(Lognormal(sigma), 256).mean
        text = f"slowest of 256 ranks alone, lognormal:{sigma:g}"
        rows.append(SimulationRow("the same, stragglers", "[D]", "near-linear", f"{found:.0%}", text))
    return rows


def _span(found: Forecast, name: str) -> str:
    if name == "failures":
        band = found.failures
        return f"{band.median:.0f} ({band.low:.0f}–{band.high:.0f})"
    band = found.goodput
    return f"{band.median:.1%} ({band.low:.1%}–{band.high:.1%})"


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.3g} h"

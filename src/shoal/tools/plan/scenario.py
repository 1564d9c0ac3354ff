"""What is simulated: a cluster, what disturbs it and what is done about it. Times are seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError

# SECTION cost/simulate/straggling
# How much longer a rank takes for a step than it usually does, and the slowest of N ranks.
#
# A step ends with its slowest rank. Drawing 16,384 ranks for each of a million steps would take minutes, so the maximum
# is drawn itself: if u is uniform, the quantile of one rank at u^(1/N) is distributed as the largest of N. With
# u = exp(-exp(-g)), g is a Gumbel variate and the slowest is nearly straight in g, which makes it easy to tabulate.


Floats = npt.NDArray[np.float64]

# Outside, a Gumbel variate lies once in 10^17 draws or less.
_GRID = np.linspace(-5.0, 40.0, 1801)
# From so many steps on, their mean is drawn as a normal variate with the exact mean and variance.
EXACT_BELOW = 256
LEAST_SAMPLES = 20
_TAIL = 0.05
_POINTS = 201


class Straggling(Protocol):
    """Of one rank in one step, independent of all others; 1 is the rank's usual time."""

    def factors(self, log_below: Floats) -> Floats | None:
        """The factors that a draw lies below with these logarithms of probability; None: always 1."""


@dataclass(frozen=True)
class Steady:
    def factors(self, log_below: Floats) -> None:
        return None


@dataclass(frozen=True)
class Lognormal:
    """exp(sigma · Z): half of the steps take longer than usual, by a few sigma at most."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= 2:
            raise ConfigError(
                f"a straggler sigma of {self.sigma:g} cannot be simulated",
                why="it is the spread of the logarithm of a rank's step time: 0.02 is quiet, 0.3 is bad",
                fix="write for example: --straggler lognormal:0.05, or --straggler none",
            )

    def factors(self, log_below: Floats) -> Floats:
        return np.exp(self.sigma * np.array([_normal_quantile(log_p) for log_p in log_below]))


@dataclass(frozen=True)
class MeasuredStraggling:
    """Quantiles of what was measured; above the last of them (`_TAIL` of the steps) an exponential tail of the mean
    that was measured there, because the slowest of many ranks lies beyond what few were seen to do."""

    quantiles: tuple[float, ...]
    tail_mean: float

    def factors(self, log_below: Floats) -> Floats:
        below, above = np.exp(log_below), -np.expm1(log_below)
        bulk = np.interp(below, np.linspace(0.0, 1.0 - _TAIL, len(self.quantiles)), self.quantiles)
        # `above` is 0 only for a single rank's certainty, which the grid does not hold.
        tail = self.quantiles[-1] - self.tail_mean * np.log(np.minimum(above / _TAIL, 1.0))
        return np.where(above < _TAIL, tail, bulk)


def fit(factors: npt.ArrayLike) -> MeasuredStraggling:
    """From each rank's own step times, divided by its median."""
    seen = np.asarray(factors, dtype=np.float64)
    seen = seen[np.isfinite(seen) & (seen > 0)]
    if len(seen) < LEAST_SAMPLES:
        raise ConfigError(
            f"{len(seen)} step times are too few to fit stragglers to",
            why=f"a distribution with a tail needs at least {LEAST_SAMPLES} of them, ranks times steps",
            fix="use a longer run, or state the spread: --straggler lognormal:0.05",
        )
    quantiles = np.quantile(seen, np.linspace(0.0, 1.0 - _TAIL, _POINTS))
    beyond = seen[seen > quantiles[-1]]
    tail_mean = float(beyond.mean() - quantiles[-1]) if len(beyond) else 0.0
    return MeasuredStraggling(tuple(map(float, quantiles)), tail_mean)


class Slowest:
    """The slowest of N ranks, as a factor on the undisturbed step."""

    def __init__(self, straggling: Straggling, ranks: int) -> None:
        self._values = straggling.factors(-np.exp(-_GRID) / ranks)
        self.mean, self.variance = (1.0, 0.0) if self._values is None else _moments(self._values)

    def draw(self, random: np.random.Generator, count: int) -> Floats:
        """`count` steps, each with its own slowest rank."""
        if self._values is None:
            return np.ones(count)
        return np.interp(random.gumbel(size=count), _GRID, self._values)

    def draw_mean(self, random: np.random.Generator, count: int) -> float:
        """Of `count` steps: their mean, drawn step by step if they are few, at once if they are many."""
        if self._values is None:
            return 1.0
        if count < EXACT_BELOW:
            return float(self.draw(random, max(count, 1)).mean())
        return max(self.mean + random.normal() * float(np.sqrt(self.variance / count)), float(self._values[0]))


def _moments(values: Floats) -> tuple[float, float]:
    """Mean and variance over the Gumbel density; the grid is even, so that weights need no widths."""
    weights = np.exp(-_GRID - np.exp(-_GRID))
    weights /= weights.sum()
    mean = float(weights @ values)
    return mean, float(weights @ (values - mean) ** 2)


def _normal_quantile(log_below: float) -> float:
    """From the end that is nearer: 1 - 10^-18 is 1 to a float, 10^-18 is not 0."""
    below, above = float(np.exp(log_below)), float(-np.expm1(log_below))
    return NormalDist().inv_cdf(below) if below < 0.5 else -NormalDist().inv_cdf(above)


StepTime = Callable[[int], float]
"""Seconds that an undisturbed step takes with so many nodes."""
Scaling = Literal["strong", "weak"]
Policy = Literal["restart", "live"]

_STEADY = Steady()
_MOST_FAILURES = 200_000


@dataclass(frozen=True)
class SimulatedCluster:
    """`strong` keeps the global batch, so that fewer nodes take longer; `weak` lets each node that is gone take its
    tokens with it. Spares take the place of lost nodes; below `min_nodes` everybody waits."""

    nodes: int
    step_s: StepTime
    tokens_per_step: float
    ranks_per_node: int = 1
    scaling: Scaling = "strong"
    min_nodes: int = 1
    spares: int = 0

    def __post_init__(self) -> None:
        _need_count("a cluster of", self.nodes, "nodes", "--nodes 8")
        _need_count("nodes with", self.ranks_per_node, "ranks each", "--ranks-per-node 1")
        _need_above_zero("tokens a step", self.tokens_per_step, "--tokens-per-step 32768")
        _need_not_negative("spare nodes", self.spares, "--spares 0")
        if not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(
                f"a training of {self.nodes} nodes that needs at least {self.min_nodes} of them",
                why="it needs at least one node, and no more than there are",
                fix=f"choose --min-nodes from 1 to {self.nodes}",
            )
        for nodes in {self.min_nodes, self.nodes}:
            _need_above_zero(f"step time with {nodes} nodes", self.step_s(nodes), "--step-s 0.5")

    def tokens(self, nodes: int) -> float:
        """Of one step."""
        return self.tokens_per_step * (nodes / self.nodes if self.scaling == "weak" else 1.0)

    @property
    def ideal_tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s(self.nodes)


@dataclass(frozen=True)
class Failures:
    """Each node fails after an exponential time. A part of the failures (a switch, the store) stops everybody but
    breaks no node."""

    mtbf_s: float = math.inf
    all_share: float = 0.0

    def __post_init__(self) -> None:
        _need_above_zero("time between failures of a node", self.mtbf_s, "--mtbf-hours 1000", infinite=True)
        if not 0 <= self.all_share <= 1:
            raise ConfigError(
                f"a part of {self.all_share:g} of the failures cannot hit all nodes",
                why="a part is between 0 and 1",
                fix="write for example: --all-share 0.1",
            )


@dataclass(frozen=True)
class RecoveryModel:
    """`restart`: everybody is stopped, started again and resumes from the last checkpoint, as torchrun does; also when
    a node comes back. `live`: the survivors regroup and redo the step; who comes back copies the state from them."""

    policy: Policy
    detect_s: float
    restart_s: float
    regroup_s: float
    rejoin_s: float
    repair_s: float

    def __post_init__(self) -> None:
        for name in ("detect", "restart", "regroup", "rejoin"):
            _need_not_negative(f"{name} time", getattr(self, f"{name}_s"), f"--{name}-s 10")
        _need_not_negative("repair time", self.repair_s, "--repair-minutes 10", infinite=True)


@dataclass(frozen=True)
class Checkpoints:
    """Every so many steps (None: never). Training stands still for `cost_s`, or, hidden, goes on while it is written;
    until it is whole, the one before counts."""

    every: int | None
    cost_s: float
    hidden: bool = False

    def __post_init__(self) -> None:
        _need_not_negative("time of a checkpoint", self.cost_s, "--checkpoint-s 5")
        if self.every is not None:
            _need_count("a checkpoint every", self.every, "steps", "--checkpoint-every 100")


@dataclass(frozen=True)
class SimulationScenario:
    cluster: SimulatedCluster
    failures: Failures
    recovery: RecoveryModel
    checkpoints: Checkpoints
    horizon_s: float
    straggling: Straggling = _STEADY

    def __post_init__(self) -> None:
        _need_above_zero("simulated time", self.horizon_s, "--hours 24")
        self._check_failures()
        self._check_hidden()

    def _check_failures(self) -> None:
        apart_s = self.failures.mtbf_s / self.cluster.nodes
        if self.horizon_s / apart_s > _MOST_FAILURES:
            raise ConfigError(
                f"a failure every {apart_s:.2g} s makes {self.horizon_s / apart_s:,.0f} of them",
                why=f"no training goes on under these; more than {_MOST_FAILURES:,} are not simulated",
                fix="raise --mtbf-hours, or simulate fewer --hours",
            )

    def _check_hidden(self) -> None:
        every, step_s = self.checkpoints.every, self.cluster.step_s(self.cluster.nodes)
        if self.checkpoints.hidden and every is not None and self.checkpoints.cost_s > every * step_s:
            raise ConfigError(
                f"a checkpoint of {self.checkpoints.cost_s:g} s is not whole when the next begins, "
                f"{every * step_s:.3g} s later",
                why="hidden checkpoints are written while training goes on, one at a time",
                fix=f"use --checkpoint-every {math.ceil(self.checkpoints.cost_s / step_s)} or more",
            )


def divided_work(step_s: float, nodes: int, scaling: Scaling) -> StepTime:
    """For want of a prediction: the work of a strong step is dealt to whoever is there, a weak one takes the same."""
    if scaling == "weak":
        return lambda there: step_s
    return lambda there: step_s * nodes / there


def from_table(seconds: Mapping[int, float]) -> StepTime:
    """Between the sizes of a table, and beyond them, as if work were divided; exact at its own sizes."""
    sizes = sorted(seconds)

    def step_s(nodes: int) -> float:
        below = max((size for size in sizes if size <= nodes), default=sizes[0])
        above = min((size for size in sizes if size >= nodes), default=sizes[-1])
        if below == above:
            return seconds[below] * below / nodes
        # Straight in 1/n: exact for divided work plus a constant.
        part = (1 / nodes - 1 / above) / (1 / below - 1 / above)
        return seconds[above] + part * (seconds[below] - seconds[above])

    return step_s


def _need_count(before: str, value: int, after: str, example: str) -> None:
    if value < 1:
        raise ConfigError(
            f"{before} {value} {after} cannot be simulated", why="there is at least 1", fix=f"for example: {example}"
        )


def _need_above_zero(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value > 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is a number above zero", fix=f"for example: {example}"
        )


def _need_not_negative(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value >= 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is zero or above", fix=f"for example: {example}"
        )

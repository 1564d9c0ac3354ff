"""What a simulation simulates: a cluster, its stragglers and failures, and how it recovers. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError

# Seconds that an undisturbed step takes with this many nodes.
StepTime = Callable[[int], float]
Scaling = Literal["strong", "weak"]
Policy = Literal["restart", "live"]
Floats = npt.NDArray[np.float64]

_MOST_FAILURES = 200_000


# Stragglers
#
# A step ends with its slowest rank. Drawing 16,384 ranks for each of a million steps would take minutes, so the maximum
# itself is drawn: if u is uniform, the quantile of one rank at u^(1/N) is distributed as the largest of N. With
# u = exp(-exp(-g)), g is a Gumbel variate, and the slowest is almost linear in g, which makes it easy to tabulate.

# A Gumbel variate lies outside once in 10^17 draws or less.
_GRID = np.linspace(-5.0, 40.0, 1801)
# The mean of this many steps or more is drawn as a normal variate with the exact mean and variance.
EXACT_BELOW = 256
LEAST_SAMPLES = 20
_TAIL = 0.05
_POINTS = 201


class Straggling(Protocol):
    """The time of one rank for one step relative to its usual time, independent of all other ranks and steps."""

    def factors(self, log_below: Floats) -> Floats | None:
        """Return the quantiles at these logarithms of probabilities; None: always 1."""


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
    """Measured quantiles. Above the last of them, for `_TAIL` of the steps, an exponential tail with the mean that was
    measured there, because the slowest of many ranks lies beyond what few ranks showed."""

    quantiles: tuple[float, ...]
    tail_mean: float

    def factors(self, log_below: Floats) -> Floats:
        below, above = np.exp(log_below), -np.expm1(log_below)
        bulk = np.interp(below, np.linspace(0.0, 1.0 - _TAIL, len(self.quantiles)), self.quantiles)
        # `above` is 0 only for the certainty of a single rank, which the grid does not contain.
        tail = self.quantiles[-1] - self.tail_mean * np.log(np.minimum(above / _TAIL, 1.0))
        return np.where(above < _TAIL, tail, bulk)


def fit_stragglers(factors: npt.ArrayLike) -> MeasuredStraggling:
    """Fit to step times of all ranks, each divided by the median of its rank."""
    samples = np.asarray(factors, dtype=np.float64)
    samples = samples[np.isfinite(samples) & (samples > 0)]
    if len(samples) < LEAST_SAMPLES:
        raise ConfigError(
            f"{len(samples)} step times are too few to fit stragglers to",
            why=f"a distribution with a tail needs at least {LEAST_SAMPLES} of them, ranks times steps",
            fix="use a longer run, or state the spread: --straggler lognormal:0.05",
        )
    quantiles = np.quantile(samples, np.linspace(0.0, 1.0 - _TAIL, _POINTS))
    beyond = samples[samples > quantiles[-1]]
    tail_mean = float(beyond.mean() - quantiles[-1]) if len(beyond) else 0.0
    return MeasuredStraggling(tuple(map(float, quantiles)), tail_mean)


class Slowest:
    """The slowest of N ranks, as a factor on the undisturbed step."""

    def __init__(self, straggling: Straggling, ranks: int) -> None:
        self._values = straggling.factors(-np.exp(-_GRID) / ranks)
        self.mean, self.variance = (1.0, 0.0) if self._values is None else _moments(self._values)

    def draw(self, random: np.random.Generator, count: int) -> Floats:
        """Draw `count` steps, each with its own slowest rank."""
        if self._values is None:
            return np.ones(count)
        return np.interp(random.gumbel(size=count), _GRID, self._values)

    def draw_mean(self, random: np.random.Generator, count: int) -> float:
        """Draw the mean of `count` steps: step by step if they are few, at once if they are many."""
        if self._values is None:
            return 1.0
        if count < EXACT_BELOW:
            return float(self.draw(random, max(count, 1)).mean())
        return max(self.mean + random.normal() * float(np.sqrt(self.variance / count)), float(self._values[0]))


def _moments(values: Floats) -> tuple[float, float]:
    """Return mean and variance over the Gumbel density; the grid is even, so weights need no widths."""
    weights = np.exp(-_GRID - np.exp(-_GRID))
    weights /= weights.sum()
    mean = float(weights @ values)
    return mean, float(weights @ (values - mean) ** 2)


def _normal_quantile(log_below: float) -> float:
    """Compute from the nearer end: as a float 1 - 10^-18 is 1, but 10^-18 is not 0."""
    below, above = float(np.exp(log_below)), float(-np.expm1(log_below))
    return NormalDist().inv_cdf(below) if below < 0.5 else -NormalDist().inv_cdf(above)


# The scenario


@dataclass(frozen=True)
class SimulatedCluster:
    nodes: int
    step_s: StepTime
    tokens_per_step: float
    ranks_per_node: int = 1
    # `strong` keeps the global batch, so that fewer nodes take longer; `weak` loses the tokens of each missing node.
    scaling: Scaling = "strong"
    min_nodes: int = 1  # with fewer, all nodes wait
    spares: int = 0  # replace lost nodes

    def __post_init__(self) -> None:
        _check_count("a cluster of", self.nodes, "nodes", "--nodes 8")
        _check_count("nodes with", self.ranks_per_node, "ranks each", "--ranks-per-node 1")
        _check_above_zero("tokens a step", self.tokens_per_step, "--tokens-per-step 32768")
        _check_not_negative("spare nodes", self.spares, "--spares 0")
        if not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(
                f"a training of {self.nodes} nodes that needs at least {self.min_nodes} of them",
                why="it needs at least one node, and no more than there are",
                fix=f"choose --min-nodes from 1 to {self.nodes}",
            )
        for nodes in {self.min_nodes, self.nodes}:
            _check_above_zero(f"step time with {nodes} nodes", self.step_s(nodes), "--step-s 0.5")

    def tokens(self, nodes: int) -> float:
        """Return the tokens of one step."""
        return self.tokens_per_step * (nodes / self.nodes if self.scaling == "weak" else 1.0)

    @property
    def ideal_tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s(self.nodes)


@dataclass(frozen=True)
class Failures:
    mtbf_s: float = math.inf  # mean time between failures of a node, exponentially distributed
    all_share: float = 0.0  # fraction of the failures (a switch, the store) that stop all nodes but break none

    def __post_init__(self) -> None:
        _check_above_zero("time between failures of a node", self.mtbf_s, "--mtbf-hours 1000", infinite=True)
        if not 0 <= self.all_share <= 1:
            raise ConfigError(
                f"a part of {self.all_share:g} of the failures cannot hit all nodes",
                why="a part is between 0 and 1",
                fix="write for example: --all-share 0.1",
            )


@dataclass(frozen=True)
class RecoveryModel:
    # `restart`: all nodes stop, start again and resume from the last checkpoint, as with torchrun; also when a node
    # returns. `live`: the survivors regroup and redo the step; a node that returns copies the state from them.
    policy: Policy
    detect_s: float
    restart_s: float
    regroup_s: float
    rejoin_s: float
    repair_s: float

    def __post_init__(self) -> None:
        for name in ("detect", "restart", "regroup", "rejoin"):
            _check_not_negative(f"{name} time", getattr(self, f"{name}_s"), f"--{name}-s 10")
        _check_not_negative("repair time", self.repair_s, "--repair-minutes 10", infinite=True)


@dataclass(frozen=True)
class Checkpoints:
    every: int | None  # steps; None: never
    cost_s: float
    # Training continues while a hidden checkpoint is written; until it is complete, the one before counts.
    hidden: bool = False

    def __post_init__(self) -> None:
        _check_not_negative("time of a checkpoint", self.cost_s, "--checkpoint-s 5")
        if self.every is not None:
            _check_count("a checkpoint every", self.every, "steps", "--checkpoint-every 100")


@dataclass(frozen=True)
class SimulationScenario:
    cluster: SimulatedCluster
    failures: Failures
    recovery: RecoveryModel
    checkpoints: Checkpoints
    horizon_s: float
    straggling: Straggling = Steady()

    def __post_init__(self) -> None:
        _check_above_zero("simulated time", self.horizon_s, "--hours 24")
        apart_s = self.failures.mtbf_s / self.cluster.nodes
        if self.horizon_s / apart_s > _MOST_FAILURES:
            raise ConfigError(
                f"a failure every {apart_s:.2g} s makes {self.horizon_s / apart_s:,.0f} of them",
                why=f"no training continues under these; more than {_MOST_FAILURES:,} are not simulated",
                fix="raise --mtbf-hours, or simulate fewer --hours",
            )
        every, step_s = self.checkpoints.every, self.cluster.step_s(self.cluster.nodes)
        if self.checkpoints.hidden and every is not None and self.checkpoints.cost_s > every * step_s:
            raise ConfigError(
                f"a checkpoint of {self.checkpoints.cost_s:g} s is not complete when the next begins, "
                f"{every * step_s:.3g} s later",
                why="hidden checkpoints are written while training continues, one at a time",
                fix=f"use --checkpoint-every {math.ceil(self.checkpoints.cost_s / step_s)} or more",
            )


def divided_work(step_s: float, nodes: int, scaling: Scaling) -> StepTime:
    """Return step times without a prediction: with strong scaling the work is divided among the nodes that are left,
    with weak scaling a step always takes the same."""
    if scaling == "weak":
        return lambda there: step_s
    return lambda there: step_s * nodes / there


def _check_count(before: str, value: int, after: str, example: str) -> None:
    if value < 1:
        raise ConfigError(
            f"{before} {value} {after} cannot be simulated", why="there is at least 1", fix=f"for example: {example}"
        )


def _check_above_zero(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value > 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is a number above zero", fix=f"for example: {example}"
        )


def _check_not_negative(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value >= 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is zero or above", fix=f"for example: {example}"
        )

"""How much longer a rank takes for a step than it usually does, and the slowest of N ranks.

A step ends with its slowest rank. Drawing 16,384 ranks for each of a million steps would take minutes, so the maximum
is drawn itself: if u is uniform, the quantile of one rank at u^(1/N) is distributed as the largest of N. With
u = exp(-exp(-g)), g is a Gumbel variate and the slowest is nearly straight in g, which makes it easy to tabulate.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError

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
class Measured:
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


def fit(factors: npt.ArrayLike) -> Measured:
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
    return Measured(tuple(map(float, quantiles)), tail_mean)


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

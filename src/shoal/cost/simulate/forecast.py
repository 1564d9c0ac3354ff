"""A scenario over many seeds: the middle, and the band that nine in ten of them lie in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.cost.simulate.engine import Paces, Training
from shoal.cost.simulate.ledger import CAUSES, Cause
from shoal.cost.simulate.scenario import Scenario
from shoal.cost.simulate.straggling import Floats
from shoal.errors import ConfigError

_BAND = (0.05, 0.5, 0.95)
BINS = 96


@dataclass(frozen=True)
class Band:
    """Median, and from the 5th to the 95th percentile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Outcome:
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
    scenario: Scenario
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


def simulate(scenario: Scenario, seeds: int = 20, seed: int = 0, bins: int = BINS) -> Forecast:
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


def outcomes_of(scenario: Scenario, seeds: int, seed: int, bins: int = BINS) -> list[Outcome]:
    paces = Paces(scenario)
    return [simulate_once(scenario, paces, (seed, number), bins) for number in range(seeds)]


def simulate_once(scenario: Scenario, paces: Paces, seed: tuple[int, int], bins: int = BINS) -> Outcome:
    training = Training(scenario, paces, seed)
    training.run()
    ledger, cluster = training.ledger, scenario.cluster
    return Outcome(
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


def _edges(scenario: Scenario, bins: int) -> Floats:
    return np.linspace(0.0, scenario.horizon_s, bins + 1)

"""Stragglers: the slowest of N ranks against brute force, and fits to measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.tools.plan.scenario import (
    EXACT_BELOW,
    Lognormal,
    MeasuredStraggling,
    Slowest,
    Steady,
    Straggling,
    fit_stragglers,
)


def brute_force(sigma: float, ranks: int, steps: int = 20_000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    random = np.random.default_rng(ranks)
    blocks = [np.exp(sigma * random.normal(size=(steps // 20, ranks))).max(axis=1) for _ in range(20)]
    return np.concatenate(blocks)


@pytest.mark.parametrize("ranks", [1, 2, 16, 300])
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_the_slowest_of_many_ranks_matches_brute_force(sigma: float, ranks: int) -> None:
    slow = brute_force(sigma, ranks)
    slowest = Slowest(Lognormal(sigma), ranks)
    drawn = slowest.draw(np.random.default_rng(0), 20_000)
    error = 4 * slow.std() / math.sqrt(len(slow))
    assert slowest.mean == pytest.approx(slow.mean(), abs=error)
    assert drawn.mean() == pytest.approx(slowest.mean, abs=error)
    assert math.sqrt(slowest.variance) == pytest.approx(slow.std(), rel=0.05)
    assert np.quantile(drawn, [0.01, 0.5, 0.99]) == pytest.approx(np.quantile(slow, [0.01, 0.5, 0.99]), rel=0.03)


def test_one_rank_has_the_moments_of_its_distribution() -> None:
    slowest = Slowest(Lognormal(0.25), 1)
    assert slowest.mean == pytest.approx(math.exp(0.25**2 / 2), rel=1e-4)
    assert slowest.variance == pytest.approx((math.exp(0.25**2) - 1) * math.exp(0.25**2), rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20_000), st.floats(0.001, 1.0))
def test_more_ranks_are_never_faster(ranks: int, sigma: float) -> None:
    few, more = Slowest(Lognormal(sigma), ranks), Slowest(Lognormal(sigma), 2 * ranks)
    assert 1 <= few.mean < more.mean


def test_the_slowest_of_16384_ranks_matches_extreme_value_theory() -> None:
    """The maximum of an exponential tail: its median is threshold + mean · ln(N · tail ÷ ln 2)."""
    known = MeasuredStraggling((1.0,) * 201, 0.1)
    drawn = Slowest(known, 16_384).draw(np.random.default_rng(0), 40_000)
    assert np.median(drawn) == pytest.approx(1 + 0.1 * math.log(16_384 * 0.05 / math.log(2)), rel=2e-3)


def test_steady_ranks_have_no_stragglers() -> None:
    slowest = Slowest(Steady(), 16_384)
    assert (slowest.mean, slowest.variance, slowest.draw_mean(np.random.default_rng(0), 10**6)) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("straggling", [Lognormal(0.3), MeasuredStraggling(tuple(np.linspace(0.9, 1.2, 201)), 0.2)])
def test_the_mean_of_many_steps_spreads_like_that_of_single_steps(straggling: Straggling) -> None:
    slowest, count = Slowest(straggling, 8), EXACT_BELOW
    random = np.random.default_rng(0)
    at_once = [slowest.draw_mean(random, count) for _ in range(4000)]
    singly = [slowest.draw(random, count).mean() for _ in range(4000)]
    assert np.mean(at_once) == pytest.approx(np.mean(singly), rel=1e-3)
    assert np.std(at_once) == pytest.approx(np.std(singly), rel=0.06)
    assert np.quantile(at_once, [0.05, 0.95]) == pytest.approx(np.quantile(singly, [0.05, 0.95]), rel=3e-3)


# The fit


def test_a_fit_keeps_the_mean_and_the_quantiles_of_the_measurements() -> None:
    seen = np.exp(0.1 * np.random.default_rng(1).normal(size=4000))
    fit = fit_stragglers(seen)
    drawn = Slowest(fit, 1).draw(np.random.default_rng(2), 100_000)
    assert drawn.mean() == pytest.approx(seen.mean(), rel=2e-3)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(seen, [0.1, 0.5, 0.9]), rel=5e-3)


def test_a_fit_predicts_the_slowest_of_more_ranks_than_were_measured() -> None:
    """From 1,000 step times to the slowest of 256 ranks, beyond most of the measurements."""
    seen = 1 + 0.05 * np.random.default_rng(1).exponential(size=1000)
    truth = (1 + 0.05 * np.random.default_rng(2).exponential(size=(4000, 256)).max(axis=1)).mean()
    assert Slowest(fit_stragglers(seen), 256).mean == pytest.approx(truth, rel=0.05)


def test_equal_step_times_give_no_stragglers() -> None:
    assert Slowest(fit_stragglers([1.0] * 50), 1000).mean == pytest.approx(1.0)


@pytest.mark.parametrize("seen", [[], [1.0] * 19, [math.nan] * 100])
def test_too_few_step_times_are_refused(seen: list[float]) -> None:
    with pytest.raises(ConfigError, match="too few") as refused:
        fit_stragglers(seen)
    assert 'straggler = "lognormal' in refused.value.fix


@pytest.mark.parametrize("sigma", [0.0, -1.0, 2.5, math.nan])
def test_an_impossible_spread_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="sigma"):
        Lognormal(sigma)

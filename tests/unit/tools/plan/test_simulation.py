"""The simulator: exact results, sums, and agreement with a step-by-step simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.tools.plan.scenario import Checkpoints, Failures, Lognormal, Policy, Scaling, Steady
from shoal.tools.plan.simulation import (
    CAUSES,
    Leg,
    Rhythm,
    TimeLedger,
    best_every,
    daly_s,
    simulate,
    simulate_seeds,
    young_s,
)
from tests.support.simulation_scenarios import HOUR, StepwiseSimulation, scenario

POLICIES: tuple[Policy, ...] = ("restart", "live")


# No failures


@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_without_failures_does_exactly_its_steps(policy: Policy) -> None:
    result = simulate_seeds(scenario(policy, step_s=0.5, hours=1, every=None), seeds=1, seed=0)[0]
    assert (result.steps, result.tokens, result.goodput) == (7200, 7_200_000.0, 1.0)
    assert set(result.lost_s.values()) == {0.0}
    assert result.tokens_per_s == pytest.approx(2000.0)


def test_checkpoints_cost_exactly_their_time() -> None:
    """Ten steps and a pause of two seconds: 300 times in an hour."""
    result = simulate_seeds(scenario(hours=1, every=10, cost_s=2.0), seeds=1, seed=0)[0]
    assert result.steps == 3000
    assert result.lost_s["checkpointing"] == pytest.approx(600.0)
    assert result.goodput == pytest.approx(3000 / 3600)


def test_hidden_checkpoints_cost_nothing() -> None:
    result = simulate_seeds(scenario(hours=1, every=10, cost_s=2.0, hidden=True), seeds=1, seed=0)[0]
    assert result.steps == 3600


# Sums


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    scaling=st.sampled_from(["strong", "weak"]),
    nodes=st.integers(1, 40),
    step_s=st.floats(0.05, 400),
    mtbf_h=st.floats(0.5, 1000) | st.just(math.inf),
    all_share=st.sampled_from([0.0, 0.2, 1.0]),
    every=st.integers(1, 500) | st.none(),
    cost_s=st.floats(0, 60),
    sigma=st.sampled_from([None, 0.1, 0.5]),
    min_part=st.floats(0, 1),
    spares=st.integers(0, 3),
    repair_s=st.floats(0, 7200) | st.just(math.inf),
)
def test_useful_and_lost_time_add_up_to_the_wall_time(
    policy: Policy, scaling: Scaling, nodes: int, step_s: float, mtbf_h: float, all_share: float, every: int | None,
    cost_s: float, sigma: float | None, min_part: float, spares: int, repair_s: float,
) -> None:  # fmt: skip
    simulated = scenario(
        policy, nodes, step_s, scaling, Lognormal(sigma) if sigma else Steady(), hours=12, mtbf_s=mtbf_h * HOUR,
        all_share=all_share, every=every, cost_s=cost_s, min_nodes=max(1, round(min_part * nodes)), spares=spares,
        repair_s=repair_s,
    )  # fmt: skip
    result = simulate_seeds(simulated, seeds=1, seed=7)[0]
    assert result.useful_s + sum(result.lost_s.values()) == pytest.approx(result.wall_s, rel=1e-9)
    assert all(result.lost_s[cause] >= -1e-6 for cause in CAUSES if cause != "straggling")
    bins = len(result.tokens_per_s)
    assert result.tokens_per_s.sum() * result.wall_s / bins == pytest.approx(result.tokens, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_trainings_and_other_seeds_others(policy: Policy) -> None:
    world = scenario(policy, mtbf_s=20 * HOUR, straggling=Lognormal(0.1))
    first, repeated, other = (simulate_seeds(world, 3, seed) for seed in (5, 5, 6))
    assert [result.tokens for result in first] == [result.tokens for result in repeated]
    assert [result.tokens for result in first] != [result.tokens for result in other]
    assert len({result.tokens for result in first}) == 3


def test_the_means_of_a_forecast_add_up() -> None:
    forecast = simulate(scenario(mtbf_s=20 * HOUR, straggling=Lognormal(0.1)), seeds=5)
    assert sum(forecast.mean_s.values()) == pytest.approx(24 * HOUR)
    assert forecast.goodput.low <= forecast.goodput.median <= forecast.goodput.high <= 1


# Against a step-by-step simulation


@pytest.mark.parametrize(("sigma", "every", "cost_s"), [(0.2, 50, 20.0), (0.05, 1, 1.0)])
def test_many_steps_at_once_match_single_steps(sigma: float, every: int, cost_s: float) -> None:
    world = scenario(
        nodes=16, step_s=12.0, hours=6, mtbf_s=8 * HOUR, every=every, cost_s=cost_s, straggling=Lognormal(sigma),
        spares=10_000,
    )  # fmt: skip
    slow = [StepwiseSimulation(world, sigma, np.random.default_rng(seed)).steps() for seed in range(60)]
    fast = [result.steps for result in simulate_seeds(world, seeds=400, seed=1)]
    spread = np.std(slow) / math.sqrt(len(slow)) + np.std(fast) / math.sqrt(len(fast))
    assert abs(np.mean(slow) - np.mean(fast)) < 3 * spread
    assert 0.7 < np.std(fast) / np.std(slow) < 1.4


def test_without_failures_many_steps_at_once_spread_like_single_steps() -> None:
    world = scenario(nodes=4, step_s=9.0, hours=3, every=100, cost_s=20.0, straggling=Lognormal(0.3))
    endless = scenario(nodes=4, step_s=9.0, hours=3, every=100, cost_s=20.0, mtbf_s=1e12, straggling=Lognormal(0.3))
    slow = [StepwiseSimulation(endless, 0.3, np.random.default_rng(seed)).steps() for seed in range(60)]
    fast = [result.steps for result in simulate_seeds(world, seeds=200, seed=1)]
    assert np.mean(fast) == pytest.approx(np.mean(slow), rel=2e-3)
    assert 0.7 < np.std(fast) / np.std(slow) < 1.4


@given(
    position=st.integers(0, 50),
    span_s=st.floats(0, 500),
    every=st.integers(1, 12),
    pause_s=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
)
def test_the_closed_form_of_a_stretch_matches_its_steps(
    position: int, span_s: float, every: int, pause_s: float
) -> None:
    """Compare the closed form with a clock that advances step by step."""
    stretch = Rhythm(1.0, every, pause_s).advance(position, 0.0, span_s)
    left_s, steps, saved = span_s, 0, None
    while left_s >= 1:
        left_s, steps = left_s - 1, steps + 1
        if (position + steps) % every == 0:
            if left_s < pause_s:
                left_s = 0.0
                break
            left_s, saved = left_s - pause_s, position + steps
    assert stretch.saved == saved
    assert stretch.steps == pytest.approx(steps + left_s, abs=1e-6)
    assert stretch.steps + stretch.paused_s == pytest.approx(span_s)


# Failures and recovery


@pytest.mark.parametrize("nodes", [16, 128, 1024])
def test_failures_are_proportional_to_the_nodes(nodes: int) -> None:
    """Poisson: the mean of forty trainings lies within four standard errors."""
    world = scenario(nodes=nodes, mtbf_s=1000 * HOUR, spares=10_000, repair_s=0.0)
    expected = nodes * 24 / 1000
    failures = [result.failures for result in simulate_seeds(world, seeds=40, seed=3)]
    assert np.mean(failures) == pytest.approx(expected, abs=4 * math.sqrt(expected / 40))


@pytest.mark.parametrize("mtbf_h", [10, 100, 1000])
def test_regrouping_live_is_never_worse_than_restarting(mtbf_h: int) -> None:
    restart, live = (
        simulate(scenario(policy, nodes=32, mtbf_s=mtbf_h * HOUR), seeds=15).goodput.median for policy in POLICIES
    )
    assert live >= restart


def test_live_recovery_redoes_little_for_each_failure() -> None:
    for result in simulate_seeds(scenario("live", nodes=4, mtbf_s=4 * HOUR, step_s=9.0), seeds=5, seed=0):
        assert 0 < result.lost_s["redone"] < result.failures * 9.0 * 4


def test_live_recovery_without_survivors_loads_the_checkpoint() -> None:
    alone = simulate_seeds(scenario("live", nodes=1, mtbf_s=2 * HOUR, every=600), seeds=5, seed=0)
    assert np.mean([result.lost_s["redone"] / result.failures for result in alone]) == pytest.approx(300, rel=0.3)


def test_a_failure_of_the_whole_job_breaks_no_node() -> None:
    results = simulate_seeds(scenario("live", mtbf_s=20 * HOUR, all_share=1.0), seeds=5, seed=0)
    assert all(result.failures > 0 and result.lost_s["reduced"] == result.lost_s["waiting"] == 0 for result in results)
    assert all(result.lost_s["recovery"] == pytest.approx(60 * result.failures, rel=0.2) for result in results)


def test_too_few_nodes_wait_and_spares_shorten_the_wait() -> None:
    needs_all = scenario(min_nodes=8, mtbf_s=20 * HOUR)
    waiting = simulate(needs_all, seeds=8).mean_s
    helped = simulate(scenario(min_nodes=8, mtbf_s=20 * HOUR, spares=3), seeds=8).mean_s
    assert waiting["waiting"] > 0
    assert waiting["reduced"] == pytest.approx(0, abs=1e-6)
    assert helped["waiting"] < 0.1 * waiting["waiting"]


def test_a_smaller_cluster_loses_as_much_with_weak_as_with_strong_scaling() -> None:
    lost: dict[Scaling, float] = {"strong": 0.0, "weak": 0.0}
    for scaling in lost:
        world = scenario("live", nodes=4, scaling=scaling, mtbf_s=10 * HOUR, repair_s=HOUR)
        lost[scaling] = simulate(world, seeds=10).mean_s["reduced"]
    assert lost["strong"] > 0
    assert lost["weak"] == pytest.approx(lost["strong"], rel=0.1)


def test_a_hidden_checkpoint_counts_only_when_it_is_complete() -> None:
    """The longer the write takes, the more is redone; no rank pauses for it."""
    redone = [
        simulate(scenario(mtbf_s=8 * HOUR, every=600, cost_s=cost_s, hidden=True), seeds=20).mean_s
        for cost_s in (0.0, 590.0)
    ]
    assert redone[1]["redone"] > 1.5 * redone[0]["redone"]
    assert redone[1]["checkpointing"] == 0


# Checkpoint interval


def test_young_and_daly_agree_where_checkpoints_are_cheap() -> None:
    assert daly_s(1.0, 1e6) == pytest.approx(young_s(1.0, 1e6), rel=1e-2)
    assert daly_s(100.0, 30.0) == 30.0


def test_the_simulator_finds_the_interval_of_young_and_daly() -> None:
    """Two thirds and three halves of it are hardly worse; a fifth and five times as long are."""
    base = scenario(nodes=64, mtbf_s=64 * 2 * HOUR, cost_s=30.0, hours=240, spares=10_000)
    best = best_every(base.cluster, base.failures, base.straggling, base.checkpoints)
    assert best == round(daly_s(30.0, 2 * HOUR))

    def goodput(every: int) -> float:
        world = scenario(nodes=64, mtbf_s=64 * 2 * HOUR, cost_s=30.0, hours=240, spares=10_000, every=every)
        return float(np.mean([result.goodput for result in simulate_seeds(world, seeds=12, seed=0)]))

    goodputs = {factor: goodput(round(factor * best)) for factor in (0.2, 0.67, 1.0, 1.5, 5.0)}
    assert max(goodputs, key=lambda factor: goodputs[factor]) in (0.67, 1.0, 1.5)
    assert goodputs[1.0] > goodputs[0.2] + 0.02
    assert goodputs[1.0] > goodputs[5.0] + 0.02


def test_without_failures_no_checkpoint_is_best_and_hidden_ones_are_most_frequent() -> None:
    world = scenario()
    assert best_every(world.cluster, Failures(), Steady(), Checkpoints(1, 5.0)) is None
    assert best_every(world.cluster, Failures(HOUR), Steady(), Checkpoints(99, 5.5, hidden=True)) == 6


def test_the_closed_form_of_the_reliability_study_is_met() -> None:
    """Kokolis et al. 2025: (1 − N·r·(u + t/2)) / (1 + w/t), for restarts u short against the time between failures."""
    nodes, mtbf_s, restart_s, interval_s, cost_s = 256, 256 * 10 * HOUR, 300.0, 1200.0, 20.0
    world = scenario(
        nodes=nodes, step_s=1.0, mtbf_s=mtbf_s, detect_s=0.0, restart_s=restart_s, every=1200, cost_s=cost_s,
        hours=500, spares=100_000,
    )  # fmt: skip
    expected = (1 - nodes / mtbf_s * (restart_s + interval_s / 2)) / (1 + cost_s / interval_s)
    assert simulate(world, seeds=20).goodput.median == pytest.approx(expected, abs=0.005)


# Step times, ledger and bad input


def test_rolling_back_moves_time_from_steps_to_redone() -> None:
    ledger = TimeLedger()
    ledger.train(Leg(0.0, 10.0, 0.0, 10.0, 1.0, 1.0, 2))
    ledger.train(Leg(10.0, 15.0, 10.0, 2.5, 1.0, 2.0, 2))
    ledger.roll_back(12)
    assert (ledger.position, ledger.redone_s) == (12, 1.0)
    ledger.roll_back(4)
    assert (ledger.position, ledger.redone_s, ledger.legs[-1].end_s) == (4, 11.0, 4.0)


@pytest.mark.parametrize(
    ("wrong", "seen", "fix"),
    [
        ({"nodes": 0}, "0 nodes", "nodes = 8"),
        ({"ranks_per_node": 0}, "0 ranks", "ranks_per_node = 1"),
        ({"step_s": -1.0}, "-1", "step_s = 0.5"),
        ({"step_s": math.nan}, "nan", "step_s = 0.5"),
        ({"min_nodes": 9}, "at least 9", "min_nodes from 1 to 8"),
        ({"mtbf_s": 0.0}, "between failures", "mtbf_hours"),
        ({"all_share": 1.5}, "1.5", "all_share = 0.1"),
        ({"detect_s": -1.0}, "detect time", "detect_s = 10"),
        ({"restart_s": math.inf}, "restart time", "restart_s = 10"),
        ({"repair_s": -60.0}, "repair time", "repair_minutes = 10"),
        ({"every": 0}, "every 0 steps", "checkpoint_every = 100"),
        ({"cost_s": -1.0}, "checkpoint", "checkpoint_s = 5"),
        ({"hours": 0.0}, "simulated time", "hours"),
        ({"hours": math.inf}, "simulated time", "hours"),
        ({"mtbf_s": 1.0}, "691,200 of them", "mtbf_hours"),
        ({"hidden": True, "every": 4, "cost_s": 5.0}, "not complete when the next begins", "checkpoint_every = 5"),
    ],
)
def test_bad_numbers_are_refused_with_reason_and_fix(wrong: dict[str, float], seen: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        scenario(**wrong)  # type: ignore[arg-type]
    assert seen in refused.value.seen
    assert refused.value.why
    assert fix in refused.value.fix


def test_a_forecast_without_seeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 seeds"):
        simulate(scenario(), seeds=0)
    with pytest.raises(ConfigError, match="-1 is not a seed"):
        simulate(scenario(), seed=-1)

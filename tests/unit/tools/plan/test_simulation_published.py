"""The simulator against published figures; sources and assumptions are in `benchmarks/_published.py`."""

from __future__ import annotations

import pytest

from _published import (
    HOROVOD,
    HOUR,
    LLAMA_INTERRUPTIONS,
    MEASURED_MTTF_H,
    P100_S,
    PROJECTED_FROM,
    PROJECTED_MTTF_H,
    bounds,
    efficiency,
    exchange_s,
    hidden_part,
    llama,
    llama_mtbf_s,
    mttf_h,
    validation,
)
from shoal.tools.plan.scenario import Lognormal, Slowest


def test_llama_3_had_419_interruptions_and_more_than_90_per_cent_effective_time() -> None:
    """With ten minutes from a failure to the next step. Fifteen keep it above 90%, twenty do not."""
    forecast = llama(llama_mtbf_s(), 600.0, seeds=10)
    assert forecast.failures.low < LLAMA_INTERRUPTIONS < forecast.failures.high
    assert forecast.goodput.low > 0.9
    assert llama(llama_mtbf_s(), 1200.0, seeds=10).goodput.median < 0.9


def test_the_failure_rate_of_another_cluster_predicts_llama_within_a_factor_of_two() -> None:
    forecast = llama(1 / PROJECTED_FROM, 600.0, seeds=10).failures
    assert LLAMA_INTERRUPTIONS < forecast.median < 2 * LLAMA_INTERRUPTIONS


@pytest.mark.parametrize(("gpus", "hours"), PROJECTED_MTTF_H.items())
def test_the_projected_times_to_failure_are_reproduced(gpus: int, hours: float) -> None:
    assert mttf_h(gpus, PROJECTED_FROM) == pytest.approx(hours, rel=0.06)


@pytest.mark.parametrize(("gpus", "hours"), MEASURED_MTTF_H.items())
def test_the_measured_times_to_failure_are_inversely_proportional_to_the_nodes(gpus: int, hours: float) -> None:
    """The 7.9 h of 1,024 GPUs give 42 days for 8, where 47.7 were measured."""
    assert mttf_h(gpus, 1 / (128 * 7.9 * HOUR)) == pytest.approx(hours, rel=0.15)


def test_measured_and_projected_times_to_failure_disagree() -> None:
    """The user of the simulator has to choose one; they differ by a factor of 3.6."""
    assert mttf_h(1024, PROJECTED_FROM) > 3 * MEASURED_MTTF_H[1024]


@pytest.mark.parametrize("model", HOROVOD)
def test_horovods_efficiencies_are_within_the_bounds_of_overlap(model: str) -> None:
    low, high = bounds(P100_S[model], exchange_s(model, 512, 25))
    assert low < HOROVOD[model] < high


@pytest.mark.parametrize("model", ["Inception V3", "ResNet-101"])
def test_the_hidden_part_of_vgg_predicts_the_other_models(model: str) -> None:
    exposed_s = (1 - hidden_part("VGG-16")) * exchange_s(model, 512, 25)
    assert efficiency(P100_S[model], exposed_s) == pytest.approx(HOROVOD[model], abs=0.04)


def test_ddp_is_nearly_linear_to_256_gpus() -> None:
    """This holds even if nothing is hidden, and with stragglers of one per cent."""
    low, high = bounds(64 / (219 * 15.7 / 10.6), exchange_s("ResNet-50", 256, 100))
    assert low > 0.9
    assert high == 1.0
    assert 1 / Slowest(Lognormal(0.01), 256).mean > 0.95


def test_every_row_of_the_table_names_its_source() -> None:
    rows = validation(seeds=2)
    assert all(row.source in ("[L]", "[R]", "[H]", "[D]") and row.assumptions for row in rows)
    assert len({(row.what, row.assumptions) for row in rows}) == len(rows)

"""Peaks of a machine that a training exceeds are not plausible: they are measured again, then refused."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import RunFailed
from shoal.tools.probe.run import _compute
from shoal.train import compute_speed
from shoal.train.compute_speed import ComputePeaks


def measured_with(peaks: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Measure a machine whose products show these rates, one after the other; its training reaches 50 GFLOP/s."""
    left = iter(peaks)
    monkeypatch.setattr(
        compute_speed,
        "_measure_peaks",
        lambda budget_s, least_side=128: {"fp32_gflops": next(left), "bf16_gflops": 1.0, "memory_gbytes_per_s": 10.0},
    )
    point = {"threads": 1, "tokens_per_s": 100.0, "gflops": 50.0}
    monkeypatch.setattr(ComputePeaks, "_train", lambda self, threads, budget_s: point)
    return {"node": "node1", **ComputePeaks().measure(0.01)}


def test_peaks_that_a_training_exceeds_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    event = measured_with([2.0, 80.0], monkeypatch)
    assert event["fp32_gflops"] == 80.0
    assert _compute(event).fp32_gflops == 80.0


def test_figures_that_cannot_be_right_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    event = measured_with([2.0, 3.0, 1.0], monkeypatch)
    assert event["fp32_gflops"] == 3.0
    with pytest.raises(RunFailed) as refused:
        _compute(event)
    assert "its training reached 50 GFLOP/s" in str(refused.value)
    assert "no profile was written" in refused.value.fix

"""Causes of slow steps, injected on an emulated node by the benchmark's own means.

Exercises engine.stragglers, cost.causes, host.node_stats.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.labs import need_lab

FILE = Path(__file__).parents[3] / "benchmarks/causes.py"


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_causes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(FILE.parent)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "names",
    [
        # Its data sleep: late also on a busy machine, where a quota may slow a rank no more than its peer is slowed.
        pytest.param(("data",), marks=pytest.mark.long),
        pytest.param(("quota", "gc", "threads", "freezes", "disk"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
@pytest.mark.timeout(900)
def test_late_ranks_are_named_with_their_cause(names: tuple[str, ...], causes: ModuleType) -> None:
    need_lab()
    with causes.training(nodes=2) as bench:
        bench.wait_for_step(60)
        for number, name in enumerate(names):
            if number:
                bench.wait_for_step(bench.step + causes.CALM_STEPS)
            row = causes.try_cause(bench, causes.TROUBLES[name])
            assert (row["rank"], row["verdict"]) == (True, True), row

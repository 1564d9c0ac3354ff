"""The size of the program and of its parts does not grow unnoticed: tests/ratchet.json has the limits."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from tests.support.paths import ROOT


def load_figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts/figures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = load_figures()
RECORDED = json.loads(FIGURES.RATCHET.read_text())


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    figures: dict[str, dict[str, int]] = FIGURES.measure()
    return figures


def test_no_figure_has_grown(measured: dict[str, dict[str, int]]) -> None:
    """To raise a limit, change the file in the same commit, with the reason under `raised`."""
    grown = [
        f"{title}, {name}: {value} instead of {RECORDED['figures'].get(title, {}).get(name, 0)}"
        for title, values in measured.items()
        for name, value in values.items()
        if value > RECORDED["figures"].get(title, {}).get(name, 0)
    ]
    assert not grown


def test_the_limits_follow_what_has_shrunk(measured: dict[str, dict[str, int]]) -> None:
    """Otherwise a later change could grow by as much: python scripts/figures.py --write."""
    behind = [
        f"{title}, {name}: {limit}, and it is {measured[title].get(name, 0)}"
        for title, values in RECORDED["figures"].items()
        for name, limit in values.items()
        if limit > 1.01 * measured[title].get(name, 0) + 20
    ]
    assert not behind


def test_lower_figures_are_written_and_higher_ones_are_not() -> None:
    recorded = {"all": {"lines": 100, "modules": 9}}
    measured = {"all": {"lines": 90, "modules": 10, "new": 3}}
    assert FIGURES.lower(recorded, measured) == {"all": {"lines": 90, "modules": 9, "new": 3}}

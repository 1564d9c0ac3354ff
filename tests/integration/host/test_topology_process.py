"""Pinning of rank processes to the cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.host.topology import this_topology
from tests.support.ranks import run_ranks
from tests.unit.host.test_topology import pin_each


@pytest.mark.parametrize(("wish", "ranks"), [("off", 2), ("auto", 1), ("auto", 99)])
def test_affinity_is_unchanged_when_pinning_is_off_or_useless(wish: str, ranks: int, tmp_path: Path) -> None:
    """Instead of 99 ranks: two that may use one core only."""
    allowed = sorted(os.sched_getaffinity(0))[: 1 if ranks == 99 else None]
    for pinned, now in run_ranks(pin_each, min(ranks, 2), tmp_path, wish, allowed):
        assert pinned is None
        assert now == allowed


@pytest.mark.skipif(this_topology().usable < 2, reason="needs two cores")
def test_ranks_of_one_machine_are_pinned_to_different_cores(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (first, now_first), (second, now_second) = run_ranks(pin_each, 2, tmp_path, "auto", allowed)
    assert list(first or ()) == now_first
    assert list(second or ()) == now_second
    assert not set(now_first) & set(now_second)

"""Runs in tests: keepers, agents and ranks are no children of the test, so they are found by their marks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from shoal.launch.found import Found, find
from shoal.trials.stopping import end_processes

T = TypeVar("T")


def wait_until(happened: Callable[[], T], within_s: float = 20.0, why: Callable[[], object] = lambda: "") -> T:
    """What it gives as soon as that is something; `why` says more when it never is."""
    deadline = time.monotonic() + within_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"waited in vain for {within_s} s: {why()}"
        time.sleep(0.02)
    return value


def parts_of(run: Path) -> dict[str, Found]:
    """The processes of a run by their part; of a rank and its own children, the rank."""
    return {found.part: found for found in reversed(find(run))}


@contextlib.contextmanager
def ended_afterwards(*runs: Path) -> Iterator[None]:
    """Ends what is left of them. Whether anything should have been left is the test's own business."""
    try:
        yield
    finally:
        end_processes([found for run in runs for found in find(run)])

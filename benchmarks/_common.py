"""What the benchmarks share: medians over alternating rounds, and where the text comes from."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def rounds(variants: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Runs all variants in turn, `count` times over: a noisy minute on a shared machine then hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1, count + 1):
        for name, measure in variants.items():
            found[name].append(measure())
            print(f"round {number}/{count}  {name:24} {found[name][-1] * 1e3:8.2f} ms a step", flush=True)
    return found


def median_ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """The median over rounds of baseline ÷ ours, each pair measured side by side."""
    return statistics.median(base / our for base, our in zip(baseline, ours, strict=True))


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """The median of single calls; the mean would report the machine's worst moment."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def options(description: str, rounds_: int, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds_)
    parser.add_argument("--steps", type=int, default=steps)
    return parser

"""How fast each node's own link is, from bursts between some pairs of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from shoal.net.scene import Trial

# A moment of sending tells 10, 100 and 1000 Mbit/s apart, and nothing of what is faster.
TELLS_UP_TO_MBPS = 1000.0


def link_rates(trials: Iterable[Trial]) -> dict[str, float]:
    """By node: the slower of sending and hearing, each with the best of its peers, since theirs may be slow."""
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    for trial in trials:
        if trial.kind == "burst":
            out[trial.source] = max(trial.numbers["mbps"], out.get(trial.source, 0.0))
            into[trial.target] = max(trial.numbers["mbps"], into.get(trial.target, 0.0))
    return {name: min(out.get(name, into.get(name, 0.0)), into.get(name, out.get(name, 0.0))) for name in out | into}


def slow_links(trials: Iterable[Trial]) -> dict[str, tuple[float, float]]:
    """Of three nodes or more, those with at most half of what the others have: both figures, in Mbit/s."""
    rates = link_rates(trials)
    found = {}
    for name, mbps in rates.items():
        others = [min(rate, TELLS_UP_TO_MBPS) for other, rate in rates.items() if other != name]
        if len(others) >= 2 and mbps <= statistics.median(others) / 2:
            found[name] = mbps, statistics.median(others)
    return found

"""The slowest of many: what a world that waits for everybody loses to chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

# Midpoints of a smooth hump that is flat at both ends: so many give ten digits.
_POINTS = 400
# Standard deviations; of 10¹⁵ draws hardly one lies further out.
_REACH = 8.0


@cache
def expected_max(count: int) -> float:
    """Of so many draws from a standard normal distribution: 0, 0.564, 0.846 … 3.24 for a thousand."""
    return _integrated([(0.0, 1.0, count)])


def expected_slowest(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Of one draw from each normal distribution."""
    kinds = [(mean, sigma, count) for (mean, sigma), count in Counter(zip(means, deviations, strict=True)).items()]
    if len(kinds) == 1:
        mean, sigma, count = kinds[0]
        return mean + sigma * expected_max(count)
    return _integrated(kinds)


def expected_max_of(samples: Sequence[float], count: int) -> float:
    """Of so many draws from what was measured, each sample as likely as the others."""
    ordered = sorted(samples)
    total = len(ordered)
    return sum(
        value * (((place + 1) / total) ** count - (place / total) ** count) for place, value in enumerate(ordered)
    )


def _integrated(kinds: Sequence[tuple[float, float, int]]) -> float:
    """Over time, how likely it is that anybody is still under way. Before `begin` somebody certainly is."""
    begin = max(mean - _REACH * sigma for mean, sigma, _ in kinds)
    end = max(mean + _REACH * sigma for mean, sigma, _ in kinds)
    late = [(mean, sigma, count) for mean, sigma, count in kinds if sigma > 0 and mean + _REACH * sigma > begin]
    width = (end - begin) / _POINTS
    return begin + width * sum(1 - _all_done(late, begin + (point + 0.5) * width) for point in range(_POINTS))


def _all_done(late: Sequence[tuple[float, float, int]], at: float) -> float:
    """The probability that nobody takes longer. By the upper tail: its digits are lost in a sum with 1."""
    logarithm = 0.0
    for mean, sigma, count in late:
        tail = 0.5 * math.erfc((at - mean) / (sigma * math.sqrt(2)))
        if tail >= 1:
            return 0.0
        logarithm += count * math.log1p(-tail)
    return math.exp(logarithm)

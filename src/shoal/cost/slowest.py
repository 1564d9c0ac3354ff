"""The slowest of many: what a world that waits for everybody loses to chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_POINTS = 2000
# Standard deviations; of 10¹⁵ draws hardly one lies further out.
_REACH = 8.0


def expected_max(count: int) -> float:
    """Of so many draws from a standard normal distribution: 0, 0.564, 0.846 … 3.24 for a thousand."""
    return expected_slowest([0.0] * count, [1.0] * count)


def expected_slowest(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Of one draw from each normal distribution. Integrates how likely it is that anybody is still under way."""
    kinds = [(mean, sigma, count) for (mean, sigma), count in Counter(zip(means, deviations, strict=True)).items()]
    begin = max(mean - _REACH * sigma for mean, sigma, _ in kinds)
    end = max(mean + _REACH * sigma for mean, sigma, _ in kinds)
    late = [kind for kind in kinds if kind[1] > 0]
    width = (end - begin) / _POINTS
    return begin + width * sum(1 - _all_done(late, begin + (point + 0.5) * width) for point in range(_POINTS))


def expected_max_of(samples: Sequence[float], count: int) -> float:
    """Of so many draws from what was measured, each sample as likely as the others."""
    ordered = sorted(samples)
    total = len(ordered)
    return sum(
        value * (((place + 1) / total) ** count - (place / total) ** count) for place, value in enumerate(ordered)
    )


def _all_done(late: Sequence[tuple[float, float, int]], at: float) -> float:
    """The probability that nobody takes longer. By the upper tail: its digits are lost in a sum with 1."""
    logarithm = 0.0
    for mean, sigma, count in late:
        tail = 0.5 * math.erfc((at - mean) / (sigma * math.sqrt(2)))
        if tail >= 1:
            return 0.0
        logarithm += count * math.log1p(-tail)
    return math.exp(logarithm)

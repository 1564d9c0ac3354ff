"""Latency and bandwidth of an operation from its measured times: `alpha + beta · bytes`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Sample = tuple[int, float]
"""Bytes, seconds."""

_TURNS = 60
# Below this a deviation is noise, however well the others agree; above that it is none, however badly they do.
_NOISE = 0.03
_MOST_NOISE = 0.1
_OUTLIER = 4.0
_TINY = 1e-9


@dataclass(frozen=True)
class Line:
    """`alpha_s` is what an empty message would take, `beta_s_per_byte` what each byte adds."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, buffer_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * buffer_bytes

    def error(self, sample: Sample) -> float:
        """Relative to what was measured."""
        return self.seconds(sample[0]) / sample[1] - 1


def fit(samples: Sequence[Sample]) -> Line:
    """Least squares on the *relative* error: 4 kB and 256 MB count alike.

    A disturbed sample is left out: which one it is shows the line of least absolute errors, which a minority cannot
    bend. Where small messages pass faster than the rate (a shaped link saves some up), large ones would put the latency
    below zero; then the smallest message says what it is.
    """
    if len({size for size, _ in samples}) < 2:
        raise ValueError("two parameters need samples of two sizes")
    line = _least_absolute(samples)
    errors = [abs(line.error(sample)) for sample in samples]
    limit = min(_MOST_NOISE, max(_NOISE, _OUTLIER * statistics.median(errors)))
    kept = [sample for sample, error in zip(samples, errors, strict=True) if error <= limit]
    if len({size for size, _ in kept}) > 1:
        line = _weighted(kept, [1 / seconds**2 for _, seconds in kept])
    if line.alpha_s == 0.0:
        size, seconds = min(samples)
        line = Line(max(0.0, seconds - line.seconds(size)), line.beta_s_per_byte)
    return line


def median_error(line: Line, samples: Sequence[Sample]) -> float:
    return statistics.median(abs(line.error(sample)) for sample in samples)


def _least_absolute(samples: Sequence[Sample]) -> Line:
    """By least squares again and again, each time weighing a sample by the inverse of its last error.

    Errors are relative to the line, not to the sample: one that was measured far too small would outweigh all others.
    """
    weights = [1 / seconds**2 for _, seconds in samples]
    for _ in range(_TURNS):
        line = _weighted(samples, weights)
        weights = [_weight(line.seconds(size), seconds) for size, seconds in samples]
    return line


def _weight(expected_s: float, seconds: float) -> float:
    expected_s = max(expected_s, _TINY)
    return 1 / (expected_s**2 * max(abs(seconds / expected_s - 1), _TINY))


def _weighted(samples: Sequence[Sample], weights: Sequence[float]) -> Line:
    """Minimises the sum of `weight · (alpha + beta·bytes − seconds)²`; neither may be negative."""
    rows = [(size, seconds, weight) for (size, seconds), weight in zip(samples, weights, strict=True)]
    n = sum(weight for _, _, weight in rows)
    x = sum(weight * size for size, _, weight in rows)
    xx = sum(weight * size * size for size, _, weight in rows)
    y = sum(weight * seconds for _, seconds, weight in rows)
    xy = sum(weight * size * seconds for size, seconds, weight in rows)
    determinant = n * xx - x * x
    alpha, beta = (xx * y - x * xy), (n * xy - x * y)
    if alpha <= 0 or determinant <= 0:
        return Line(0.0, xy / xx)
    return Line(alpha / determinant, beta / determinant) if beta > 0 else Line(y / n, 0.0)

"""Which sizes of a collective are measured, and how often, so that a slow link keeps within the time there is."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cost.fit import Sample, fit
from shoal.units import format_number

FIRST_BYTES = 4 << 10
STEP = 4
SIZES: tuple[int, ...] = tuple(FIRST_BYTES * STEP**power for power in range(9))
"""4 kB, 16 kB … 256 MB."""
FEW_SIZES = (FIRST_BYTES, 64 << 10, 1 << 20, 16 << 20)
"""For what training uses less: enough for two parameters."""

# Two parameters need two sizes, and the smallest two cost next to nothing on any link.
LEAST_SIZES = 2
LEAST_ROUNDS = 3
MOST_ROUNDS = 25
# A small size is repeated within a round, as often as costs no more than this part of it.
_PART = 0.02
_MOST_REPEATS = 8
# What is held out lies half way to the largest size.
_WITH_HELD_OUT = 1.5


def expected_s(size: int, seen: Sequence[Sample]) -> float:
    """From what smaller ones took: all of them by their fit, a single one as if bytes were everything."""
    if len({bytes_ for bytes_, _ in seen}) > 1:
        return fit(seen).seconds(size)
    return max((seconds * max(1.0, size / bytes_) for bytes_, seconds in seen), default=0.0)


def is_affordable(once_s: float, seen: Sequence[Sample], left_s: float) -> bool:
    """Whether a size that takes `once_s` can come round often enough in the time that is left, with all before it."""
    round_s = sum(seconds for _, seconds in seen) + _WITH_HELD_OUT * once_s
    return len(seen) < LEAST_SIZES or LEAST_ROUNDS * round_s <= left_s


def rounds_for(round_s: float, left_s: float) -> int:
    """Rounds over all sizes, rather than one size after another: a noisy moment then hits all of them."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left_s / round_s)))


def repeats_for(once_s: float, round_s: float) -> int:
    return max(1, min(_MOST_REPEATS, int(_PART * round_s / once_s)))


def held_out_size(sizes: Sequence[int]) -> int:
    """Between the two largest that were measured: where a prediction is wanted, and where none was fitted."""
    return max(sizes) // 2


def size_text(buffer_bytes: int) -> str:
    """`4 KiB`, `25 MiB`: the sizes here are powers of two."""
    for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if buffer_bytes >= 0.99 * scale:
            return f"{format_number(buffer_bytes / scale)} {unit}"
    return f"{buffer_bytes} B"

"""The rate of a flow from what its receiver noted. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

Note = tuple[float, int]
"""When, and how many bytes had come by then."""

_SKIPPED_PART = 0.2
_MOST_SKIPPED_S = 0.5
_PARTS = 10


def skip_s(seconds: float) -> float:
    """The beginning does not count: TCP still seeks the rate, and a shaped link lets its first bytes pass early."""
    return min(_MOST_SKIPPED_S, _SKIPPED_PART * seconds)


def rate_bps(streams: Sequence[Sequence[Note]], seconds: float) -> float:
    """Of all streams together, while all of them were flowing: the median of ten parts of that time, so that a moment
    in which some other program had the machine does not count."""
    if not streams or not all(streams):
        raise ValueError("a stream brought nothing")
    begin = max(notes[0][0] for notes in streams) + skip_s(seconds)
    end = min(notes[-1][0] for notes in streams)
    if end <= begin:
        raise ValueError("the streams did not last")
    part_s = (end - begin) / _PARTS
    marks = [sum(_bytes_at(notes, begin + number * part_s) for notes in streams) for number in range(_PARTS + 1)]
    return 8 * statistics.median(after - before for before, after in pairwise(marks)) / part_s


def _bytes_at(notes: Sequence[Note], moment: float) -> float:
    """Between two notes as if the bytes had come evenly."""
    after = bisect_right(notes, (moment, float("inf")))
    if after == len(notes):
        return float(notes[-1][1])
    if after == 0:
        return float(notes[0][1])
    (before_at, before), (after_at, bytes_) = notes[after - 1], notes[after]
    return before + (bytes_ - before) * (moment - before_at) / (after_at - before_at)

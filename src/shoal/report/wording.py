"""Measured numbers as words, the same in every text of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.units import format_duration

# Other programs that kept fewer cores busy than this did not change what was measured.
DISTURBING_CORES = 0.25
_LISTED = 4

_SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def ms(seconds: float) -> str:
    """Three digits are what a median of a few dozen steps is good for; from a second on, seconds."""
    value = seconds * 1e3
    if abs(value) >= 999.5:
        return format_duration(seconds) if seconds > 0 else f"-{format_duration(-seconds)}"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


def percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def percents(parts: Sequence[float]) -> list[int]:
    """Each part's share of their sum, in whole percent that add up to 100: the largest remainders are rounded up. Of
    nothing they are all 0."""
    whole = sum(parts)
    if not 0 < whole < math.inf:
        return [0] * len(parts)
    exact = [100 * part / whole for part in parts]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda at: rounded[at] - exact[at])
    for at in by_remainder[: 100 - sum(rounded)]:
        rounded[at] += 1
    return rounded


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def tokens(number: float) -> str:
    return f"{number:,.0f} tokens"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number) or f"{number} times"


def ranks(number: int) -> str:
    word = _SMALL[number] if number < len(_SMALL) else str(number)
    return f"{word} rank" if number == 1 else f"{word} ranks"


def warn_of_other_programs(cores: Mapping[str, float | None]) -> str:
    """The warning beside figures that were measured while other programs used the processor; empty on a quiet machine.

    `cores` they kept busy, on average, by what was measured meanwhile (`with two ranks`, `on node1`); None is unknown.
    """
    known = {what: load for what, load in cores.items() if load is not None}
    if not known or max(known.values()) < DISTURBING_CORES:
        return ""
    if len(cores) == 1:
        [load] = known.values()
        return f"Other programs kept {load:.1f} cores busy meanwhile, so on a quiet machine it is faster."
    if len(known) > _LISTED:
        known = {what: known[what] for what in (min(known, key=lambda w: known[w]), max(known, key=lambda w: known[w]))}
        listed = " to ".join(f"{load:.1f} {what}" for what, load in known.items())
    else:
        listed = join([f"{load:.1f} {what}" for what, load in known.items()])
    again = "measure again when it is quiet before you believe these figures"
    return f"Other programs kept cores busy meanwhile ({listed}, on average): {again}."


def join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

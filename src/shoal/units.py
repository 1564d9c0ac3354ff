"""Formats and parses numbers as people write them: `25 MB`, `1.3M parameters`, `2 min 05 s`, `100mbit`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_RATE_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)", re.IGNORECASE)
_TIME_SCALES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NUMBER_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
# Other programs that kept fewer cores busy than this did not change what was measured.
DISTURBING_CORES = 0.25
# Loads of at most this many places are listed one by one; of more, only the lowest and the highest.
_MOST_LISTED = 4


def format_number(value: float, digits: int = 3) -> str:
    """Return `digits` significant digits without an exponent: `6200` is `6,200`, not `6.2e+03`."""
    text = f"{value:.{digits}g}"
    if "e-" in text:
        mantissa, _, exponent = text.partition("e-")
        # As many decimal places as the digits of the mantissa reach.
        return f"{float(text):.{int(exponent) + len(mantissa.partition('.')[2])}f}"
    return f"{value:,.0f}" if "e+" in text else text


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a value with an SI prefix, in powers of 1000: `format_si(1_347_000, "B")` is `1.35 MB`."""
    scale, prefix = _si_scale(value, lambda scaled: abs(float(f"{scaled:.{digits}g}")))
    return f"{format_number(value / scale, digits)} {prefix}{unit}".rstrip()


def format_count(value: float) -> str:
    """Return a short count with enough digits to recognise a model: `124439808` is `124.44M`."""
    scale, prefix = _si_scale(value, lambda scaled: abs(round(scaled, 2)))
    return f"{value / scale:.2f}{prefix}" if prefix else f"{value:g}"


def _si_scale(value: float, rounded: Callable[[float], float]) -> tuple[float, str]:
    """Return the smallest scale in which the rounded value is below 1000: 999,936 bytes are 1 MB."""
    scales = ((1.0, ""), *reversed(_SI))
    return next((entry for entry in scales if rounded(value / entry[0]) < 1000), scales[-1])


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units. A value that rounds up to the next unit is shown in it."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours:02d} h"


def format_ms(seconds: float) -> str:
    """Return milliseconds with three digits, which is what a median of a few dozen steps supports.

    From 1 s on these are seconds, and below 0.1 ms microseconds.
    """
    value = seconds * 1e3
    if abs(value) >= 999.5:
        return format_duration(seconds)
    if 0 < abs(value) < 0.0995:
        return f"{seconds * 1e6:.2g} µs"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


def format_percent(part: float) -> str:
    # Adding zero turns -0.0 into 0.0: it is never written -0%.
    return f"{round(100 * part) + 0.0:.0f}%"


def format_change(part: float) -> str:
    """Return `+1.2%` or `-0.3%`; what rounds to zero has no sign."""
    text = f"{part:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"


def whole_percents(parts: Sequence[float]) -> list[int]:
    """Return each part's share of the sum in whole percent that add up to 100; all 0 if the sum is 0.

    The largest remainders are rounded up.
    """
    whole = sum(parts)
    if not 0 < whole < math.inf:
        return [0] * len(parts)
    exact = [100 * part / whole for part in parts]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: rounded[index] - exact[index])
    for index in by_remainder[: 100 - sum(rounded)]:
        rounded[index] += 1
    return rounded


def parse_rate(text: str) -> float:
    """Return bits per second from `100mbit` or `2.5gbit`. `bps` is refused: tc reads it as bytes, others as bits."""
    match = _RATE.fullmatch(text.strip())
    rate_bps = float(match[1]) * _RATE_SCALES[match[2].lower()] if match else 0.0
    if rate_bps <= 0:
        raise UsageError(
            f"{text!r} is not a link rate",
            why="a rate is a number above zero with its unit: kbit, mbit or gbit (bits a second)",
            fix="write for example: 100mbit, 1gbit or 2.5gbit",
        )
    return rate_bps


def format_rate(rate_bps: float) -> str:
    """Return `1gbit` for `1e9`, as `parse_rate` and tc read it."""
    for scale, prefix in _SI:
        if rate_bps >= scale:
            return f"{rate_bps / scale:.6g}{prefix.lower()}bit"
    return f"{rate_bps:.6g}bit"


def parse_delay(text: str) -> float:
    """Return seconds from `2ms`, `500us` or `0.1s`."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a delay",
            why="a delay is a number with its unit: us, ms or s",
            fix="write for example: 2ms",
        )
    return float(match[1]) * _TIME_SCALES[match[2].lower()]


# The first and the last number, both included.
Span = tuple[int, int]


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in ascending order, those that touch or overlap as one. Drop empty ones (last before first).

    The cost depends on the number of spans, not on their lengths: one damaged line of a file may claim 2^62.
    """
    merged: list[Span] = []
    for first, last in sorted(span for span in spans if span[0] <= span[1]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def to_spans(numbers: Iterable[int]) -> list[Span]:
    """Return `[(1, 3), (7, 7)]` for `[3, 1, 2, 7]`."""
    return merge_spans((number, number) for number in numbers)


def subtract_spans(spans: Iterable[Span], removed: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` that `removed` does not cover."""
    left: list[Span] = []
    holes = merge_spans(removed)
    place = 0
    for first, last in merge_spans(spans):
        while place < len(holes) and holes[place][1] < first:
            place += 1
        ahead = place
        while ahead < len(holes) and holes[ahead][0] <= last:
            left.append((first, holes[ahead][0] - 1))
            first = holes[ahead][1] + 1
            ahead += 1
        left.append((first, last))
    return [span for span in left if span[0] <= span[1]]


def format_spans(spans: Iterable[Span], most: int = 4) -> str:
    """Return `3, 7 to 9, …`."""
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join([*texts[:most], *(["…"] if len(texts) > most else [])])


@dataclass(frozen=True)
class Unit:
    """What the speed of a training counts."""

    name: str  # in the plural


TOKENS = Unit("tokens")
SAMPLES = Unit("samples")
# What the loss of a user's script is: step.backward divides by its samples, or by the `count` that it is given.
SCRIPT_LOSS = "mean per sample, or per count"


def unit_of(event: Mapping[str, Any]) -> Unit:
    """Return the unit of a `start` or `step` event: tokens where it counts them, as shoal's GPT does, else samples."""
    return TOKENS if (event.get("tokens_per_step") or event.get("tokens")) is not None else SAMPLES


def format_speed(per_s: float, unit: Unit = TOKENS) -> str:
    return f"{format_rounded(per_s)} {unit.name}/s"


def format_amount(number: float, unit: Unit = TOKENS) -> str:
    return f"{number:,.0f} {unit.name}"


def format_rounded(value: float) -> str:
    """Return a whole number with thousands separators, or two digits of a small one."""
    return f"{value:,.0f}" if not 0 < abs(value) < 9.5 else f"{value:.2g}"


def format_value(value: float) -> str:
    """Return four digits of a number whose meaning is not known; with an exponent where it would be long."""
    return format_number(value, 4) if math.isfinite(value) and 1e-4 <= abs(value) < 1e7 else f"{value:.4g}"


def format_loss(loss: float) -> str:
    """Return three decimals, or three digits of a loss that is too small or too large for them."""
    return f"{loss:.3f}" if loss == 0 or not math.isfinite(loss) or 0.01 <= abs(loss) < 1e5 else f"{loss:.3g}"


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number) or f"{number} times"


def name_ranks(number: int) -> str:
    word = _NUMBER_WORDS[number] if number < len(_NUMBER_WORDS) else str(number)
    return f"{word} rank" if number == 1 else f"{word} ranks"


def rank_list(ids: Iterable[int]) -> str:
    """Return `rank 0, 2` for the ranks 2 and 0."""
    return f"rank {', '.join(map(str, sorted(ids)))}"


def rank_names(ids: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1 and 2`."""
    return f"rank {ids[0]}" if len(ids) == 1 else f"ranks {join_words([str(rank) for rank in ids])}"


def join_words(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def warn_of_other_programs(cores: Mapping[str, float | None]) -> str:
    """Return a warning for figures that were measured while other programs used the processor; else an empty text.

    `cores` is how many cores they kept busy on average, keyed by the place or time of the measurement (`with two
    ranks`, `on node1`); None is unknown.
    """
    known = {where: load for where, load in cores.items() if load is not None}
    if not known or max(known.values()) < DISTURBING_CORES:
        return ""
    if len(cores) == 1:
        [load] = known.values()
        return f"Other programs kept {load:.1f} cores busy meanwhile, so on a quiet machine it is faster."
    if len(known) > _MOST_LISTED:
        ends = {where: known[where] for where in (min(known, key=known.__getitem__), max(known, key=known.__getitem__))}
        listed = " to ".join(f"{load:.1f} {where}" for where, load in ends.items())
    else:
        listed = join_words([f"{load:.1f} {where}" for where, load in known.items()])
    again = "measure again when it is quiet before you believe these figures"
    return f"Other programs kept cores busy meanwhile ({listed}, on average): {again}."

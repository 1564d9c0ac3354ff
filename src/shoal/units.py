"""Numbers as people write them: `25 MB`, `1.3M parameters`, `2 min 05 s`, `100mbit`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_RATE_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)", re.IGNORECASE)
_TIME_SCALES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_number(value: float, digits: int = 3) -> str:
    """So many significant digits, and never an exponent: `6200` is `6,200`, not `6.2e+03`."""
    text = f"{value:.{digits}g}"
    if "e-" in text:
        mantissa, _, exponent = text.partition("e-")
        # As many places behind the point as the digits of the mantissa reach.
        return f"{float(text):.{int(exponent) + len(mantissa.partition('.')[2])}f}"
    return f"{value:,.0f}" if "e+" in text else text


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """`format_si(1_347_000, "B")` is `1.35 MB`; units are powers of 1000, as on a network."""
    scale, prefix = _si_scale(value, lambda scaled: abs(float(f"{scaled:.{digits}g}")))
    return f"{format_number(value / scale, digits)} {prefix}{unit}".rstrip()


def format_count(value: float) -> str:
    """`124439808` is `124.44M`: short, but enough digits to recognise a model by."""
    scale, prefix = _si_scale(value, lambda scaled: abs(round(scaled, 2)))
    return f"{value / scale:.2f}{prefix}" if prefix else f"{value:g}"


def _si_scale(value: float, shown: Callable[[float], float]) -> tuple[float, str]:
    """The smallest in which the number has three digits at most as it is `shown`: 999,936 bytes are 1 MB, rounded."""
    scales = ((1.0, ""), *reversed(_SI))
    return next((entry for entry in scales if shown(value / entry[0]) < 1000), scales[-1])


def format_duration(seconds: float) -> str:
    """Two units at most, because nobody plans an evening in milliseconds. What rounds to the next unit is in it."""
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
    return f"{hours} h {minutes:02d} min"


def format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"


def parse_rate(text: str) -> float:
    """Bits a second from `100mbit` or `2.5gbit`. Not `bps`, which tc reads as bytes and everybody else as bits."""
    match = _RATE.fullmatch(text.strip())
    rate_bps = float(match[1]) * _RATE_SCALES[match[2].lower()] if match else 0.0
    if rate_bps <= 0:
        raise UsageError(
            f"{text!r} is no link rate",
            why="a rate is a number above zero with its unit: kbit, mbit or gbit (bits a second)",
            fix="write for example: 100mbit, 1gbit or 2.5gbit",
        )
    return rate_bps


def format_rate(rate_bps: float) -> str:
    """`1e9` is `1gbit`; what `parse_rate` and tc read."""
    for scale, prefix in _SI:
        if rate_bps >= scale:
            return f"{rate_bps / scale:.6g}{prefix.lower()}bit"
    return f"{rate_bps:.6g}bit"


def parse_delay(text: str) -> float:
    """Seconds from `2ms`, `500us` or `0.1s`."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no delay", why="a delay is a number with its unit: us, ms or s", fix="write for example: 2ms"
        )
    return float(match[1]) * _TIME_SCALES[match[2].lower()]


def format_delay(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.6g}{unit}"
    return f"{seconds * 1e6:.6g}us"


# First and last, both included.
Span = tuple[int, int]


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Spans in ascending order, those that touch or overlap as one. An empty span (last before first) is left out.

    The cost is that of the number of spans, not of the numbers in them: one damaged line of a file may claim 2^62.
    """
    found: list[Span] = []
    for first, last in sorted(span for span in spans if span[0] <= span[1]):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """`[3, 1, 2, 7]` is `[(1, 3), (7, 7)]`."""
    return merge_spans((number, number) for number in numbers)


def subtract_spans(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """What `spans` have and `taken` have not."""
    found: list[Span] = []
    others = merge_spans(taken)
    place = 0
    for first, last in merge_spans(spans):
        while place < len(others) and others[place][1] < first:
            place += 1
        ahead = place
        while ahead < len(others) and others[ahead][0] <= last:
            found.append((first, others[ahead][0] - 1))
            first = others[ahead][1] + 1
            ahead += 1
        found.append((first, last))
    return [span for span in found if span[0] <= span[1]]


def format_spans(spans: Iterable[Span], most: int = 4) -> str:
    """`3, 7 to 9, …`."""
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join([*texts[:most], *(["…"] if len(texts) > most else [])])


# SECTION report/wording
# Measured numbers as words, the same in every text of a report.


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

"""Numbers as people write them: `25 MB`, `1.3M parameters`, `2 min 05 s`."""

from __future__ import annotations

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """`format_si(1_347_000, "B")` is `1.35 MB`; units are powers of 1000, as on a network."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}".rstrip()
    return f"{value:.{digits}g} {unit}".rstrip()


def format_count(value: float) -> str:
    """`124439808` is `124.44M`: short, but enough digits to recognise a model by."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return f"{value / scale:.2f}{prefix}"
    return f"{value:g}"


def format_duration(seconds: float) -> str:
    """Two units at most, because nobody plans an evening in milliseconds."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"

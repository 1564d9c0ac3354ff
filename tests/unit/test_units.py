"""Number formats: three digits and a unit, never an exponent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.network import format_buffer_size
from shoal.units import (
    format_change,
    format_count,
    format_duration,
    format_ms,
    format_number,
    format_percent,
    format_si,
    whole_percents,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_936, "1 MB"),
        (999_499, "999 kB"),
        (1_347_000, "1.35 MB"),
        (999_999_999, "1 GB"),
        (-999_936, "-1 MB"),
        (5.2e15, "5,200 TB"),
    ],
)
def test_bytes_that_round_up_use_the_next_unit(value: float, text: str) -> None:
    assert format_si(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00099996, "1 ms"),
        (0.9996, "1 s"),
        (59.97, "1 min 00 s"),
        (6.2, "6.2 s"),
        (0.0123, "12.3 ms"),
        (104, "1 min 44 s"),
        (7265, "2 h 01 min"),
        (6200 * 3600, "258 days 08 h"),
        (-6.2, "-6.2 s"),
    ],
)
def test_durations_that_round_up_use_the_next_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_step_of_seconds_is_formatted_in_seconds() -> None:
    texts = [format_ms(seconds) for seconds in (6.2, 0.9996, 0.123, 0.0123, -6.2, 4.71e-5, 0.0)]
    assert texts == ["6.2 s", "1 s", "123 ms", "12.3 ms", "-6.2 s", "47 µs", "0 ms"]


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert [format_percent(part) for part in (-0.001, 0.001, -0.02, 0.5)] == ["0%", "0%", "-2%", "50%"]
    assert [format_change(part) for part in (-0.0004, 0.0, 0.0123, -0.5)] == ["0.0%", "0.0%", "+1.2%", "-50.0%"]


def test_counts_that_round_up_use_the_next_unit() -> None:
    assert [format_count(value) for value in (999_999, 124_439_808, 12)] == ["1.00M", "124.44M", "12"]


@given(st.one_of(st.floats(0, 1e17), st.floats(-1e-2, 1e-2)))
def test_no_number_has_an_exponent(value: float) -> None:
    texts = format_si(value, "B") + format_number(value) + format_duration(value) + format_buffer_size(round(value))
    assert "e+" not in texts
    assert "e-" not in texts
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=0.006)


def test_small_numbers_keep_their_digits() -> None:
    texts = [format_number(value) for value in (1e-5, 1.234e-5, 9.996e-5, -2e-7, 0.00012, 6200)]
    assert texts == ["0.00001", "0.0000123", "0.0001", "-0.0000002", "0.00012", "6,200"]


def test_percents_of_zero_parts_are_zero() -> None:
    assert whole_percents([0.0, 0.0]) == [0, 0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(sum))
def test_percents_add_up_to_100(parts: list[float]) -> None:
    percents = whole_percents(parts)
    assert sum(percents) == 100
    assert all(abs(share - 100 * part / sum(parts)) < 1 for share, part in zip(percents, parts, strict=True))

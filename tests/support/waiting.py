"""Wait for something with a deadline, in tests and benchmarks: one way, with one error."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_EVERY_S = 0.02


class NotInTime(AssertionError):
    """What was awaited has not happened; not an OSError, which tests suppress here and there."""


def wait_until(
    happened: Callable[[], T],
    within_s: float = 60.0,
    why: Callable[[], object] = lambda: "",
    every_s: float = _EVERY_S,
) -> T:
    """Return the first truthy value of `happened`, which may raise where it is pointless to wait longer.

    If the time runs out, the error has the source of `happened`, its last value, and what `why` returns then.
    """
    deadline = time.monotonic() + within_s
    while not (value := happened()):
        if time.monotonic() > deadline:
            raise NotInTime(_describe(happened, within_s, value, why))
        time.sleep(every_s)
    return value


async def wait_until_async(
    happened: Callable[[], T], within_s: float = 60.0, why: Callable[[], object] = lambda: ""
) -> T:
    """Do the same as `wait_until`, while the other tasks of this loop continue."""
    deadline = time.monotonic() + within_s
    while not (value := happened()):
        if time.monotonic() > deadline:
            raise NotInTime(_describe(happened, within_s, value, why))
        await asyncio.sleep(_EVERY_S)
    return value


def _describe(happened: Callable[[], object], within_s: float, value: object, why: Callable[[], object]) -> str:
    try:
        awaited = " ".join(inspect.getsource(happened).split())
    except (OSError, TypeError):  # such as a partial
        awaited = repr(happened)
    return f"not within {within_s:g} s: {awaited}\nlast value: {value!r}\n{why()}".rstrip()

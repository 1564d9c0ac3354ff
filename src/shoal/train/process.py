"""A rank as a process: it takes a signal as a wish, and says why it failed."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType

from shoal.errors import ShoalError
from shoal.train.trainer import StopWish


def catch_stop_signals(stop: StopWish, is_elastic: bool) -> None:
    """Finish the step, save, leave. Asking twice does not help here: the launcher ends those it cannot wait for. Where
    the others can go on, SIGTERM is what it is for any process: a machine says it before it is switched off."""

    def wish(signum: int, frame: FrameType | None) -> None:
        stop.wanted = True

    signal.signal(signal.SIGINT, wish)
    if not is_elastic:
        signal.signal(signal.SIGTERM, wish)


def say(error: ShoalError) -> int:
    """Into the log, or onto the terminal when a person started us; returns the exit code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(error.render())
    return error.exit_code

"""A rank as a process: it dies with whoever started it, takes a signal as a wish, and says why it failed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

from shoal.errors import ShoalError
from shoal.train.trainer import StopWish

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """A launcher that is killed takes its ranks along, instead of leaving them to hold ports and cores.

    Linux only; elsewhere orphans end at their next failed exchange, within `sync.timeout_s`.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It died before we asked.
        os._exit(1)


def catch_stop_signals(stop: StopWish) -> None:
    """Finish the step, save, leave. Asking twice does not help here: the launcher ends those it cannot wait for."""

    def wish(signum: int, frame: FrameType | None) -> None:
        stop.wanted = True

    signal.signal(signal.SIGINT, wish)
    signal.signal(signal.SIGTERM, wish)


def say(error: ShoalError) -> int:
    """Into the log, or onto the terminal when a person started us; returns the exit code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(error.render())
    return error.exit_code

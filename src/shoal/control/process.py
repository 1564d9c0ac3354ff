"""What a process of a run may take for granted: which cores it has, and that it goes when its parent goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1


def physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core share its arithmetic, so they count once."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def tie_to(parent: int) -> Callable[[], None]:
    """A function that has the kernel kill its caller when `parent` is gone, or at once if it is gone already.

    Linux only; elsewhere an orphaned rank ends at its next failed exchange, within `sync.timeout_s`. The library is
    opened here and not in the function, which may run between fork and exec, where nothing heavy is safe.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel

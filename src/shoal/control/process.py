"""How processes of a run hang together: marked as belonging to it, and gone when their parent goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
RUN_MARK = "SHOAL_RUN"
PART_MARK = "SHOAL_PART"


def unmark() -> None:
    """For a marked process whose children are no part of the run in their own right, such as a lab's."""
    for name in (RUN_MARK, PART_MARK):
        os.environ.pop(name, None)


def marks(run: Path | str, part: str) -> dict[str, str]:
    """Variables by which a process is later known as ours, whatever its number and parent are by then."""
    return {RUN_MARK: str(run), PART_MARK: part}


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

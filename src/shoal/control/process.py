"""How processes of a run hang together: marked as belonging to it, and gone when their parent goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Python ignores these in every process it runs, so that they become exceptions.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
RUN_MARK = "SHOAL_RUN"
PART_MARK = "SHOAL_PART"


def unmark() -> None:
    """For a marked process whose children are no part of the run in their own right, such as a lab's."""
    for name in (RUN_MARK, PART_MARK):
        os.environ.pop(name, None)


def marks(run: Path | str, part: str) -> dict[str, str]:
    """Variables by which a process is later known as ours, whatever its number and parent are by then."""
    return {RUN_MARK: str(run), PART_MARK: part}


def default_signals() -> None:
    """Gives every signal its default action and blocks none. For a child, between fork and exec.

    A program inherits what its parent ignores and blocks. A shell has its background jobs ignore SIGINT, and a rank
    that inherits it can never be asked to stop. `subprocess` restores only what Python itself changed.
    """
    for signum in signal.valid_signals():
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def restore_signals(signals: Iterable[int] | None = None) -> None:
    """The same for a Python program at its start, where SIGINT raises KeyboardInterrupt. For these signals, or all."""
    chosen = set(signal.valid_signals() if signals is None else signals) - _IGNORED_BY_PYTHON
    for signum in chosen:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, chosen)


def prepare_child(parent: int) -> Callable[[], None]:
    """What a rank does between fork and exec: it is tied to its parent and begins with default signals."""
    tie = tie_to(parent)

    def prepare() -> None:
        tie()
        default_signals()

    return prepare


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

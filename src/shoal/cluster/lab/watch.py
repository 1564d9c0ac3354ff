"""Remove the lab of a run when the run's process ends.

    python -m shoal.cluster.lab.watch LAB PID START

This is a process of its own, because a crash or SIGKILL that ends the run must not end it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

from shoal.host.proc import start_ticks


def main(name: str, owner: int, owner_start_ticks: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        owner_fd = os.pidfd_open(owner)
        if start_ticks(owner) == owner_start_ticks:
            select.select([owner_fd], [], [])
    # Imported late: this process waits for hours, and needs a third of the memory without it.
    from shoal.cluster.lab.lab import remove_lab

    remove_lab(name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

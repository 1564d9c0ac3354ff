"""The watcher of a lab that belongs to a run: sleeps until that process ends, then takes the lab down.

    python -m shoal.cluster.lab.watch LAB PID START

A process of its own, because whatever ends a run (a crash, SIGKILL) must not end this.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

from shoal.cluster.lab.processes import started


def main(name: str, owner: int, began: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        if started(owner) == began:
            select.select([handle], [], [])
    # Imported late: it waits for hours with a third of the memory.
    from shoal.cluster.lab.lab import remove

    remove(name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

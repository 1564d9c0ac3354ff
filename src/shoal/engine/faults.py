"""What ended a rank: classify its exception, and record it for the launcher."""

from __future__ import annotations

import contextlib
import re

import torch

from shoal.control.rank_env import Placement
from shoal.errors import OutOfMemory, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.run_folder import RunFolder
from shoal.units import format_si

# torch's allocator has two messages for it, and the third is the kernel's. From inside a communication hook the class
# of an error is only a word in the message of another one.
_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",
    "std::bad_alloc",
)
# A thread needs memory for its stack; but the number of threads of a user or container may also be limited.
_NO_THREAD_TEXTS = ("can't start new thread", "Resource temporarily unavailable")


def record_fault(run: RunFolder, placement: Placement, error: ShoalError) -> None:
    with contextlib.suppress(OSError):
        log = EventLog(run.events(placement.rank), placement.rank)
        log.write("fault", node=placement.node, **error.as_dict())
        log.close()


def as_fault(error: Exception, placement: Placement, relief: str) -> ShoalError:
    """Classify an exception of this rank's own."""
    text = str(error).strip().split("\n")[0]
    rank = placement.rank
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _OUT_OF_MEMORY_TEXTS):
        requested = re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE)
        what = f"it asked for {format_si(int(requested[1]), 'B')} more" if requested else text or "an allocation failed"
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory: {what}",
            why="its weights, moments and activations need more than the memory, or the limit, of the machine",
            fix=relief,
        )
    if any(sign in text for sign in _NO_THREAD_TEXTS):
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory, or of threads: {text}",
            why="a thread needs memory; and a user or a container may have a limited number of threads",
            fix=f"{relief}; or raise the limit: ulimit -u, the container's pids",
        )
    return RunFailed(f"rank {rank} raised {type(error).__name__}: {text}")

"""A group for whoever waits in C++, out of our reach: DDP's reducer.

It compares the replicas' shapes when it is made, agrees on the order of its buckets at its second step, and without a
hook it sums the gradients itself. Each of these can wait in a send that gloo ends only at its deadline (see
`waiting.py`). In a world that can be over, DDP is given this group, whose exchanges end with the generation.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from shoal.sync.waiting import Release, await_work
from shoal.sync.world import World


def freeable(world: World) -> dist.ProcessGroup:
    """NCCL's exchanges do not wait on the processor, and end when their group is destroyed."""
    if world.release is None or world.backend != "gloo":
        return world.group
    return _FreeableGroup(world.group, world.release)


class _FreeableGroup(dist.ProcessGroup):
    """What DDP asks of a group, and no more. Whoever hands it to C++ has to keep it as well: C++ has only its half."""

    def __init__(self, group: dist.ProcessGroup, release: Release) -> None:
        # The one that torch's stubs leave out: it alone makes an object whose methods C++ calls.
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._release = release

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Not gloo's: DDP would ask for a gloo of ours to describe in its log."""
        return "freeable"

    def broadcast(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.broadcast(*asked, **more))

    def allreduce(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.allreduce(*asked, **more))

    def allgather(self, *asked: Any, **more: Any) -> dist.Work:
        return self._guarded(self._group.allgather(*asked, **more))

    def _guarded(self, work: dist.Work) -> dist.Work:
        return _FreeableWork(work, self._release)


class _FreeableWork(dist.Work):
    def __init__(self, work: dist.Work, release: Release) -> None:
        super().__init__()
        self._work = work
        self._release = release

    def wait(self, timeout: timedelta | None = None) -> bool:
        await_work(self._work, self._release)
        return True

    def get_future(self) -> Future[Any]:
        return self._release.guard(self._work.get_future())

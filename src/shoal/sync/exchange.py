"""The few numbers that ranks tell each other in every step: loss, who was ready when, who wants to stop.

Gathered while the optimizer works, so nobody waits for it: right after an all-reduce all ranks are together anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.sync.gradients import CommTimes
from shoal.sync.world import World

_FIELDS = 3


@dataclass(frozen=True)
class Shared:
    """What all ranks know of a step once it is over; the same on every rank but for `wait_s`."""

    loss_sum: float
    stop: bool
    wait_s: float


class StepExchange:
    """`begin` when backward has ended, `finish` when the optimizer has.

    How long this rank waited for the slowest follows from everybody's time since the end of the last all-reduce, when
    all were together: durations only, since clocks of two machines are never compared.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._mine = torch.zeros(_FIELDS, dtype=torch.float64, device=world.device)
        self._rows = [torch.zeros_like(self._mine) for _ in range(world.size)]
        self._work: dist.Work | None = None
        self._together_at = time.perf_counter()
        self._ready_s = 0.0

    def begin(self, loss_sum: float, comm: CommTimes, stop: bool) -> None:
        self._ready_s = comm.ready_at - self._together_at
        self._together_at = comm.ready_at + comm.tail_s
        self._mine.copy_(torch.tensor([loss_sum, self._ready_s, float(stop)], dtype=torch.float64))
        self._work = dist.all_gather(self._rows, self._mine, group=self._world.group, async_op=True)

    def finish(self) -> Shared:
        assert self._work is not None  # noqa: S101 - begin has been called
        self._work.wait()
        loss_sum, ready_s, stop = torch.stack(self._rows).cpu().unbind(dim=1)
        return Shared(
            loss_sum=float(loss_sum.sum()), stop=bool(stop.any()), wait_s=float(ready_s.max()) - self._ready_s
        )


def sum_over_world(world: World, values: list[float]) -> list[float]:
    """A handful of numbers added up over all ranks, in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, group=world.group)
    return [float(value) for value in tensor.cpu()]


def worst_over_world(world: World, values: list[float]) -> list[float]:
    """The largest of each number over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=world.group)
    return [float(value) for value in tensor.cpu()]

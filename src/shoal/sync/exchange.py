"""The few numbers that ranks tell each other in every step: loss, who was ready when, who wants to stop.

Gathered while the optimizer works, so nobody waits for it: right after an all-reduce all ranks are together anyway.
Where there is none in a step, ranks may drift apart: what they told each other is then waited for some steps later.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.times import CommTimes
from shoal.sync.vitals import Kernel, Vitals
from shoal.sync.waiting import await_work
from shoal.sync.world import World, without_group

# So rarely is the kernel asked: it takes a tenth of a millisecond.
_VITALS_EVERY = 5


@dataclass(frozen=True)
class Told:
    """One rank's figures. `ready_s`: from when all were together to the end of its own work."""

    ready_s: float
    vitals: Vitals


@dataclass(frozen=True)
class Shared:
    """What all ranks know of a step once it is over; the same on every rank but for `wait_s`. `edge`: somebody was
    told that all are to stop together after a step. `told` is by rank."""

    loss_sum: float
    stop: bool
    wait_s: float
    edge: bool
    told: tuple[Told, ...]


@dataclass(frozen=True)
class _Asked:
    """One step's numbers on their way."""

    mine: Tensor
    rows: list[Tensor]
    work: dist.Work
    ready_s: float

    def read(self, world: World) -> Shared:
        await_work(self.work, world.release)
        matrix = torch.stack(self.rows).cpu()
        loss_sum, ready_s, stop, edge = matrix[:, :4].unbind(dim=1)
        return Shared(
            loss_sum=float(loss_sum.sum()),
            stop=bool(stop.any()),
            wait_s=float(ready_s.max()) - self.ready_s,
            edge=bool(edge.any()),
            told=tuple(Told(ready, Vitals(*vitals)) for _, ready, _, _, *vitals in matrix.tolist()),
        )


class StepExchange:
    """`begin` when backward has ended, `finish` when the optimizer has.

    How long this rank waited for the slowest follows from everybody's time since the end of the last all-reduce, when
    all were together: durations only, since clocks of two machines are never compared.

    With a `lag` of L, `finish` of step s gives what became known: step s - L, and only when everybody has begun the
    step after that one, so that all have had it. All ranks learn the same at the same step. `late_s` is how long the
    last `finish` waited for ranks that are behind.
    """

    def __init__(self, world: World, lag: int = 0) -> None:
        self._world = world
        self._lag = lag
        self._asked: deque[_Asked] = deque()
        self._together_at = time.perf_counter()
        self._kernel = Kernel()
        self._vitals = Vitals()
        self._begun = 0
        self._waited_s = 0.0
        self.late_s = 0.0

    def begin(self, loss_sum: float, comm: CommTimes, stop: bool, edge: bool = False) -> None:
        ready_s = comm.ready_at - self._together_at - self._waited_s
        self._together_at = comm.ready_at + comm.tail_s
        self._begun += 1
        if self._begun % _VITALS_EVERY == 0:
            self._vitals = self._kernel.look()
        figures = [loss_sum, ready_s, stop, edge, *self._vitals.numbers()]
        mine = torch.tensor(figures, dtype=torch.float64, device=self._world.device)
        rows = [torch.zeros_like(mine) for _ in range(self._world.size)]
        work = dist.all_gather(rows, mine, group=self._world.group, async_op=True)
        assert work is not None  # noqa: S101 - only a rank outside the group gets None
        self._asked.append(_Asked(mine, rows, work, ready_s))

    def finish(self) -> list[Shared]:
        """One step's, in order; none in the first steps of a lagging exchange."""
        began = time.perf_counter()
        found = self._finish()
        # Whoever waits here for figures on their way is not slow itself.
        self._waited_s = time.perf_counter() - began
        self.late_s = self._waited_s if self._lag else 0.0
        return found

    def _finish(self) -> list[Shared]:
        if not self._lag:
            return self.drain()
        if len(self._asked) <= self._lag:
            return []
        await_work(self._asked[1].work, self._world.release)
        return self._read(1)

    def let_go(self) -> None:
        """Nothing more is asked or read; what this rank told the others stays known."""
        self._world = without_group(self._world)

    def own_losses(self) -> list[float]:
        """This rank's own sums of the steps of which nothing is known yet."""
        return [float(asked.mine[0]) for asked in self._asked]

    def drain(self) -> list[Shared]:
        """Everything that was asked so far; waits for everybody."""
        return self._read(len(self._asked))

    def _read(self, count: int) -> list[Shared]:
        """Forgotten only when it has been read: where that fails, this rank's own losses are all there is to tell."""
        found = [asked.read(self._world) for asked in islice(self._asked, count)]
        for _ in found:
            self._asked.popleft()
        return found


def sum_over_world(world: World, values: list[float]) -> list[float]:
    """A handful of numbers added up over all ranks, in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    await_work(dist.all_reduce(tensor, group=world.group, async_op=True), world.release)
    return [float(value) for value in tensor.cpu()]


def worst_over_world(world: World, values: list[float]) -> list[float]:
    """The largest of each number over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    await_work(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=world.group, async_op=True), world.release)
    return [float(value) for value in tensor.cpu()]

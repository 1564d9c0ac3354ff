"""In the background and in order: sum inside the machine, then over the wire between machines, then spread inside.

Backward goes on meanwhile. Two threads at most, one a turnstile, so that the next bucket is summed inside while this
one is on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from torch import Tensor

from shoal.sync.shared.meet import Together
from shoal.sync.wires import Bucket, Wire

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Content = TypeVar("Content", contravariant=True)

# What a wire is handed of an item, once it is summed inside the machine.
AsBucket = Callable[[Tensor], Bucket]


class Summing(Protocol[Content]):
    """One way to sum through shared memory; all ranks of a machine call it with the same things in the same order."""

    def sum(self, item: Content, for_all: bool) -> Tensor:
        """The sum over this machine: on all its ranks, or on the first alone."""
        ...

    def spread(self, item: Content) -> None:
        """What the first rank has now, on all of them."""
        ...


class Pipeline(Generic[Item]):
    """`wire` is what the first rank of a machine sends its sums by, and nobody else."""

    def __init__(self, together: Together, summing: Summing[Item], wire: Wire | None) -> None:
        self._machines = len(together.kin.firsts)
        self._summing = summing
        self._wire = wire
        self._together = together
        self._inside = Stage("inside", together.close)
        self._spread = Stage("spread", together.close)

    def put(self, item: Item, as_bucket: AsBucket) -> Future[float]:
        """When it was done, by perf_counter."""
        if self._machines == 1:
            return self._inside.do(self._sum, item)
        sent = self._inside.do(self._sum_and_send, item, as_bucket)
        return self._spread.do(self._receive, item, sent)

    def close(self) -> None:
        """With nothing under way."""
        for stage in (self._inside, self._spread):
            stage.end()
        self._together.close()

    def _sum(self, item: Item) -> float:
        self._summing.sum(item, for_all=True)
        return time.perf_counter()

    def _sum_and_send(self, item: Item, as_bucket: AsBucket) -> Callable[[], None]:
        flat = self._summing.sum(item, for_all=False)
        if self._wire is None:
            return lambda: None
        arriving = self._wire(as_bucket(flat))

        def receive() -> None:
            arrived = arriving.wait()
            if arrived.data_ptr() != flat.data_ptr():
                flat.copy_(arrived)

        return receive

    def _receive(self, item: Item, sent: Future[Callable[[], None]]) -> float:
        sent.result()()
        self._summing.spread(item)
        return time.perf_counter()


class Stage:
    """One thread, one thing after another. Once something failed nothing else is tried: after a deadline has passed,
    every later thing would wait for another one."""

    def __init__(self, name: str, give_up: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._give_up = give_up
        self._failed: Exception | None = None

    def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self._try, partial(work, *args, **kwargs))

    def end(self) -> None:
        self._threads.shutdown()

    def _try(self, work: Callable[[], T]) -> T:
        if self._failed is not None:
            raise self._failed
        try:
            return work()
        except Exception as error:
            self._failed = error
            self._give_up()
            raise

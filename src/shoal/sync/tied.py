"""The gradient of a weight that is embedding and head at once, sent in two parts.

Backward finishes such a weight last, because the embedding is the last thing it comes to, although the head's part was
known first: of GPT-2's gradients that is 31%, and nothing is left to hide it behind. But the embedding's part touches
only the rows of this batch's tokens. So the head's part travels first of all, behind the whole of backward, and at the
end every rank sends its few rows to all others, who add them in the order of the ranks: the same bits everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.cost.buckets import touches_few_rows
from shoal.sync.waiting import await_work
from shoal.sync.wires import Bucket, Wire
from shoal.sync.world import World

# Before those of DDP, which count from 0.
_INDEX = -1
_ROW_NUMBER_BYTES = 8


@runtime_checkable
class HasTiedHead(Protocol):
    """A model that hands the head's part of `tied`'s gradient to `take_head` as soon as it is known; what comes back
    goes the usual way, and None is taken care of."""

    tied_name: str
    take_head: Callable[[Tensor], Tensor | None] | None


def pays(weight: Tensor, tokens: int, world: World) -> bool:
    """Whether a rank's `tokens` of one micro-batch touch few rows."""
    return world.device.type == "cpu" and touches_few_rows(len(weight), tokens, world.size)


class TiedHead:
    def __init__(self, weight: nn.Parameter, tokens: int, world: World, wire: Wire) -> None:
        self._weight = weight
        self._world = world
        self._wire = wire
        self._arriving: Future[Tensor] | None = None
        self.is_last = True
        self.spans: list[list[float]] = []
        self._tokens = tokens
        self._rows = torch.empty(world.size * tokens, dtype=torch.int64)
        self._parts = torch.empty(world.size * tokens, weight.shape[1], dtype=weight.dtype)

    @property
    def extra_bytes(self) -> int:
        """What the rows add to the bytes of a rank's gradients, of which it sends 2(N-1)/N."""
        one = self._tokens * (_ROW_NUMBER_BYTES + self._weight.shape[1] * self._weight.itemsize)
        return one * self._world.size // 2

    def take(self, dense: Tensor) -> Tensor | None:
        """Called from backward, at its beginning. What earlier micro-batches left goes with it."""
        if not self.is_last:
            return dense
        if self._weight.grad is not None:
            dense.add_(self._weight.grad)
            self._weight.grad = None
        span = [time.perf_counter(), 0.0]
        self.spans = [span]

        def note_end(done: Future[Tensor]) -> Tensor:
            span[1] = time.perf_counter()
            return done.value().view_as(dense)

        self._arriving = self._wire(Bucket(_INDEX, dense.view(-1), [self._weight], is_last=False)).then(note_end)
        return None

    def finish(self) -> None:
        """The rows, once backward is through; afterwards the weight's gradient is the sum over the world."""
        if self._arriving is None:
            return
        rest = self._weight.grad
        assert rest is not None  # noqa: S101 - the embedding was used
        assert rest.is_sparse  # noqa: S101 - alone it has rows only
        began = time.perf_counter()
        self._exchange(rest._indices()[0], rest._values())
        self.spans.append([began, time.perf_counter()])
        summed, self._arriving = self._arriving.wait(), None
        summed.index_add_(0, self._rows, self._parts)
        self._weight.grad = summed

    def _exchange(self, rows: Tensor, parts: Tensor) -> None:
        # By the group itself: the public function of this name changed between the versions of torch that we allow.
        group = self._world.group
        both = [group._allgather_base(self._rows, rows), group._allgather_base(self._parts, parts)]
        for work in both:
            await_work(work, self._world.release)


def take_over(model: nn.Module, tokens: int | None, world: World, wire: Wire) -> TiedHead | None:
    """DDP is told to leave the weight to us: it would wait for the embedding's part of its gradient."""
    if tokens is None or not isinstance(model, HasTiedHead):
        return None
    weight = model.get_parameter(model.tied_name)
    if not pays(weight, tokens, world):
        return None
    tied = TiedHead(weight, tokens, world, wire)
    model.take_head = tied.take
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [model.tied_name])
    return tied


def give_back(model: nn.Module) -> None:
    if isinstance(model, HasTiedHead):
        model.take_head = None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [])

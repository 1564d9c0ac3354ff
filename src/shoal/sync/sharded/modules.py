"""ZeRO-3: a rank has the weights of a unit only while that unit computes. See docs/sharded.md.

Before the forward of a unit all ranks give each other their parts of its weights; after it their memory is freed. The
same happens for backward, after which the sums of the unit's gradients are on their owners. The parts for the next unit
travel while one computes. The memory of a weight is taken away and given back under the tensors that refer to it, so
that backward finds what forward has saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UsageError
from shoal.sync.sharded.exchange import Part, PartExchange, Spread
from shoal.sync.sharded.layout import ShardLayout
from shoal.sync.sharded.pending import WeightGuard
from shoal.sync.sharded.units import ModuleUnit

WEIGHTS, GRADIENTS = "weights", "gradients"


class UnitWeights:
    """Gathers and frees the weights of units, in the same order on all ranks."""

    def __init__(
        self,
        units: Sequence[ModuleUnit],
        layout: ShardLayout,
        rank: int,
        parts: Mapping[tuple[int, int], Part],
        exchange: PartExchange | None,
    ) -> None:
        """`units` are the buckets of the layout, in its order. `parts` are those of this rank, by bucket and owner."""
        self._units = units
        self._layout = layout
        self._rank = rank
        self._parts = parts
        self._exchange = exchange
        self._arriving: dict[int, Future[float] | None] = {}  # Gathered units; None where nothing had to be sent.
        self._in_backward: set[int] = set()
        self._whole = 0  # Callers that need all units.
        self._order: list[int] = []  # In which forward needs the units.
        self._is_order_known = False
        # What was sent in this micro-batch, in order: the weights of a unit, or its gradients.
        self.operations: list[tuple[str, int]] = []
        self._waited_s: dict[str, float] = {}
        self._hooks: list[Any] = []
        for index, unit in enumerate(units):
            for module in unit.modules:
                self._hooks.append(module.register_forward_pre_hook(self._make_pre_hook(index)))
                self._hooks.append(module.register_forward_hook(self._make_hook(index)))
        self._depth = [0] * len(units)
        self._guard = WeightGuard(self._require)
        for index in range(len(units)):
            self._free_memory(index)
        self.guard()

    def guard(self) -> None:
        """Refuse uses of weights that are not here, until backward."""
        buckets = {p: index for index, unit in enumerate(self._units) for p in unit.parameters}
        self._guard.begin(buckets)

    def _require(self, index: int) -> bool:
        if index not in self._arriving:
            raise UsageError(
                f"the program used a weight of {self._units[index].name or 'the model'} outside of the forward of its "
                "module",
                why="with zero3 a rank has the weights of a module only while it computes",
                fix="use them on all ranks together: with session.whole_weights(): …",
            )
        return False

    def close(self) -> None:
        self._guard.end()
        for hook in self._hooks:
            hook.remove()
        for index in list(self._arriving):
            self._arriving.pop(index)
            self._free_memory(index)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model has all weights. All ranks enter it together."""
        self._whole += 1
        try:
            for index in range(len(self._units)):
                self._need(index)
            yield
        finally:
            self._whole -= 1
            self.free_unused()

    def keep_whole(self) -> None:
        """Give the model all its weights, for good."""
        self._guard.end()
        self._whole += 1
        for index in range(len(self._units)):
            self._need(index)
        self._arriving.clear()

    def begin_backward(self) -> None:
        self._guard.end()

    def done(self, index: int) -> None:
        """Free a unit whose gradients are complete."""
        self._in_backward.discard(index)
        self._release(index)

    def free_unused(self) -> None:
        """Free what forward or backward has gathered, at the end of a micro-batch."""
        self._in_backward.clear()
        self._depth = [0] * len(self._units)
        for index in list(self._arriving):
            self._release(index)

    def take_waited_s(self) -> dict[str, float]:
        """Return how long the phases of a step have waited for weights since the last call."""
        waited_s, self._waited_s = self._waited_s, {}
        return waited_s

    def know_order(self) -> None:
        """Fetch units ahead from now on: forward has shown in which order it needs them. All ranks call it at once."""
        self._is_order_known = bool(self._order)

    def repeat(self, index: int) -> None:
        """Send this rank's part of a unit for another rank's micro-batch."""
        self._need(index)
        self._release(index)

    # Hooks.

    def _make_pre_hook(self, index: int) -> Callable[..., None]:
        def gather(module: nn.Module, inputs: Any) -> None:
            self._depth[index] += 1
            if index not in self._order:
                self._order.append(index)
            self._need(index)
            if index not in self._in_backward:
                self._fetch_ahead(self._order, index)

        return gather

    def _make_hook(self, index: int) -> Callable[..., None]:
        def free(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._depth[index] -= 1
            if torch.is_grad_enabled():
                for leaf in tree_leaves(outputs):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _: self._before_backward(index))
            is_rest = not self._units[index].name
            keeps = is_rest and torch.is_grad_enabled()
            if not self._depth[index] and index not in self._in_backward and not keeps:
                self._release(index)

        return free

    def _before_backward(self, index: int) -> None:
        self._in_backward.add(index)
        self._need(index)
        self._fetch_ahead(self._order[::-1], index)

    def _fetch_ahead(self, order: Sequence[int], index: int) -> None:
        if self._is_order_known and index in order:
            following = order[order.index(index) + 1 :]
            if following and following[0] not in self._arriving and self._units[following[0]].name:
                self._gather(following[0])

    # Weights.

    def _need(self, index: int) -> None:
        """Return when this rank has a unit's weights."""
        if index not in self._arriving:
            self._gather(index)
        arriving = self._arriving[index]
        if arriving is not None:
            began = time.perf_counter()
            arriving.result()
            phase = "backward" if self._in_backward else "forward"
            self._waited_s[phase] = self._waited_s.get(phase, 0.0) + time.perf_counter() - began
            self._arriving[index] = None

    @torch.no_grad()
    def _gather(self, index: int) -> None:
        self.operations.append((WEIGHTS, index))
        # Not intercepted: these weights are what the guard waits for.
        with torch._C.DisableTorchFunction():
            flats = []
            for parameter in self._units[index].parameters:
                storage = parameter.untyped_storage()
                storage.resize_(parameter.nbytes)
                # A tensor of its own on this memory: what backward has saved must not look changed.
                flats.append(torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage))
            weights = Spread(self._layout.buckets[index], flats)
            for owner in self._layout.held_by(self._rank):
                part = self._parts[index, owner]
                weights.write(part.begin, part.begin + len(part.numbers), part.numbers)
        if self._exchange is None:
            self._arriving[index] = None
        else:
            self._arriving[index] = self._exchange.gather(index, self._parts[index, self._rank], weights, is_last=True)

    def _release(self, index: int) -> None:
        if self._whole or index not in self._arriving:
            return
        arriving = self._arriving.pop(index)
        if arriving is not None:
            arriving.result()
        self._free_memory(index)

    def _free_memory(self, index: int) -> None:
        with torch._C.DisableTorchFunction():
            for parameter in self._units[index].parameters:
                parameter.untyped_storage().resize_(0)

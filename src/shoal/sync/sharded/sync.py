"""ZeRO: every rank sums, keeps and updates its part of the model. See docs/sharded.md.

    ShardedSync      sums gradients: with ZeRO-1 once a step, with ZeRO-2 and ZeRO-3 after every micro-batch
    UpdatedWeights   with ZeRO-1 and ZeRO-2: sends the new weights to all ranks, behind the forward of the next step
    UnitWeights      with ZeRO-3: gathers the weights of a module while it computes (`modules.py`)

Both use one `PartExchange`, whose thread does one exchange after the other, and a process group of its own: the ranks
do other collectives at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.sync.compression.base import State, load_tensors
from shoal.sync.gradients import SyncDefaults
from shoal.sync.interruptible import await_work
from shoal.sync.outer import OuterSync
from shoal.sync.sharded.exchange import ExactPart, Part, PartExchange, Spread
from shoal.sync.sharded.held import HeldPiece, flat, shaped_like, squares_of
from shoal.sync.sharded.layout import ShardLayout
from shoal.sync.sharded.modules import GRADIENTS, WEIGHTS, UnitWeights
from shoal.sync.sharded.pending import WeightGuard, can_intercept
from shoal.sync.step_stats import CommTimes, covered, max_over_world
from shoal.sync.world import World

# ZeRO-2 waits for its buckets after each group of this many, while the next group is made: their memory is used again.
_BUCKET_GROUP = 2


@dataclass
class _StepExchange:
    """What has been exchanged of a step."""

    is_last: bool = True  # The micro-batch at work is this rank's last one.
    round: int = 0  # Micro-batches that were exchanged, where each is.
    next: int = 0  # The bucket that is sent next.
    reached: set[nn.Parameter] = field(default_factory=set)  # Those that have got a gradient.
    sent: list[tuple[float, Future[float]]] = field(default_factory=list)
    operations: list[tuple[str, int]] = field(default_factory=list)  # Of the last micro-batch, see `UnitWeights`.


class ShardedSync(SyncDefaults):
    """Sums the gradients of the parts that this rank keeps, in the gradients of its pieces."""

    def __init__(
        self,
        module: nn.Module,
        world: World,
        layout: ShardLayout,
        parameters: Sequence[nn.Parameter],
        held: Sequence[HeldPiece],
        exchange: PartExchange | None,
        level: int,
        units: UnitWeights | None = None,
        may_leave_out: bool = False,
    ) -> None:
        """With `may_leave_out` a step may leave parameters without a gradient, on some ranks or on all."""
        self.module = module
        self.units = units  # Gathers and frees weights, where they are divided too.
        self.weights: UpdatedWeights | None = None
        self.rounds = 1  # Micro-batches of the rank that has most.
        self._world = world
        self._layout = layout
        self._parameters = parameters  # In the order of the layout.
        self._held = held
        self.exchange = exchange  # None for a single rank.
        self._buckets = [_GradientBucket(index, layout, parameters) for index in range(len(layout.buckets))]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        # By bucket and owner, where gradients are exchanged in every micro-batch.
        self._sums = {} if level == 1 or exchange is None else _make_sums(layout, world.rank, parameters)
        self._may_leave_out = may_leave_out
        self._step = _StepExchange()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]

    @property
    def keeps_gradients(self) -> bool:
        """Whether the model has its gradients until the end of the step."""
        return not self._sums

    def begin_step(self) -> None:
        """Begin a step, also one that is done again from its first micro-batch."""
        self._step = _StepExchange(operations=self._step.operations)
        for bucket in self._buckets:
            bucket.start_round(keep=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        if self.weights is not None:
            self.weights.complete()
        if self.units is not None:
            self.units.begin_backward()
        self._step.is_last = last
        loss.backward()
        if not last and not self.keeps_gradients:
            self._finish_round(is_final=False)

    def finish(self, only: Collection[Tensor] | None = None) -> CommTimes:
        self._step.is_last = True
        self._finish_round(is_final=self.keeps_gradients or self._step.round + 1 == self.rounds)
        while not self.keeps_gradients and self._step.round < self.rounds:
            # Another rank has more micro-batches than this one.
            self._repeat_round(is_final=self._step.round + 1 == self.rounds)
        if self.units is not None:
            self.units.know_order()
        spans = [[begin, done.result()] for begin, done in self._step.sent]
        self._set_sums(self._find_used())
        now = time.perf_counter()
        ready_at = spans[-1][0] if spans else now
        self._step = _StepExchange(operations=self._step.operations)
        return CommTimes(ready_at, now - ready_at, covered(spans) if spans else 0.0, None if spans else 0.0)

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of all ranks' sums, each element counted at its owner."""
        owned = {id(piece.weight) for piece in self._held if piece.owner == self._world.rank}
        own = [p.grad for p in parameters if p.grad is not None and id(p) in owned]
        squares = squares_of(own, self._world.device).to(self._world.control_device)
        if self._world.size > 1:
            await_work(dist.all_reduce(squares, group=self._world.group, async_op=True), self._world.release)
        return squares.sqrt().float()

    def free_sums(self) -> None:
        """Free the memory of the sums, after the last step."""
        for part in self._sums.values():
            part.numbers = part.numbers.new_empty(0)
        for piece in self._held:
            piece.weight.grad = None

    def take_waited_s(self) -> dict[str, float]:
        """Return how long the phases of a step have waited for weights since the last call."""
        waits = self.weights or self.units
        return {} if waits is None else waits.take_waited_s()

    def state(self) -> dict[str, Tensor]:
        residuals = self.exchange.residuals if self.exchange is not None else []
        return {f"residual.{number}": tensor for number, tensor in enumerate(residuals) if len(tensor)}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.weights is not None:
            self.weights.close()
        if self.units is not None:
            self.units.close()
        if self.exchange is not None:
            self.exchange.close()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient that backward has made into its bucket, and send full buckets."""
        if self.exchange is None:
            return
        bucket = self._bucket_of[parameter]
        if bucket.index < self._step.next:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, after the first "
                "was sent",
                why="torch.utils.checkpoint with use_reentrant=True runs a backward of its own for each segment, and "
                "two segments use this parameter",
                fix="checkpoint(..., use_reentrant=False)",
            )
        bucket.take(parameter, adds=not self.keeps_gradients and parameter not in bucket.missing)
        self._step.reached.add(parameter)
        if not self.keeps_gradients:
            parameter.grad = None
        if self._step.is_last or not self.keeps_gradients:
            bucket.missing.discard(parameter)
            if self.units is not None and not bucket.missing:
                self.units.done(bucket.index)
            # In the order of the buckets, whichever is full first: all ranks must send in the same order.
            while self._step.next < len(self._buckets) and not self._buckets[self._step.next].missing:
                self._send_next(self.keeps_gradients or self._step.round + 1 == self.rounds)

    def _finish_round(self, is_final: bool) -> None:
        """Send what is left of a micro-batch: buckets with parameters that the loss did not use."""
        while self.exchange is not None and self._step.next < len(self._buckets):
            self._buckets[self._step.next].fill_in_zeros()
            self._send_next(is_final)
        self._step.next = 0
        self._step.round += 1
        if self.units is not None:
            self._step.operations, self.units.operations = self.units.operations, []
            self.units.free_unused()
            self.units.guard()

    def _repeat_round(self, is_final: bool) -> None:
        """Take part in the exchanges of a micro-batch that only other ranks have, in the order of the last one."""
        for kind, index in self._step.operations:
            if self.units is not None and kind == WEIGHTS:
                self.units.repeat(index)
            else:
                self._buckets[index].fill_in_zeros()
                self._send_next(is_final)
        self._finish_round(is_final)

    def _send_next(self, is_final: bool) -> None:
        assert self.exchange is not None  # noqa: S101 - only a rank with others sends
        bucket = self._buckets[self._step.next]
        is_last = self._step.next == len(self._buckets) - 1
        if not self.keeps_gradients and self._step.next % _BUCKET_GROUP == 0:
            for _, done in self._step.sent[-2 * _BUCKET_GROUP : -_BUCKET_GROUP]:
                done.result()
        self._step.next += 1
        if self.units is not None:
            self.units.operations.append((GRADIENTS, bucket.index))
        gradients, sums, copy = Part(0, bucket.flat), None, None
        if self.keeps_gradients:
            copy = gradients if self._layout.copy_shift else None
        else:
            own, *copies = (self._sums[bucket.index, owner] for owner in self._layout.held_by(self._world.rank))
            sums, copy = own, copies[0] if copies and is_final else None
            if self._step.round == 0:
                own.numbers.zero_()
        bucket.start_round(keep=self.keeps_gradients)
        ends_group = not self.keeps_gradients and self._step.next % _BUCKET_GROUP == 0
        done = self.exchange.reduce_scatter(bucket.index, gradients, sums, copy, is_last or ends_group)
        self._step.sent.append((time.perf_counter(), done))

    def _find_used(self) -> Collection[int]:
        """Return the numbers of the parameters that have a gradient on any rank."""
        numbers: Collection[int] = range(len(self._parameters))
        if self._may_leave_out and self.exchange is not None:
            reached = self._step.reached
            counts = max_over_world(self._world, [float(parameter in reached) for parameter in self._parameters])
            numbers = {number for number, count in enumerate(counts) if count}
        return numbers

    def _set_sums(self, used: Collection[int]) -> None:
        """Give every piece its sum as its gradient; none where no rank has one, as in one process."""
        for piece in self._held:
            place, bucket = piece.place, self._buckets[piece.bucket]
            begin, end = place.offset, place.offset + place.count
            if self.exchange is None:
                gradient = self._parameters[place.parameter].grad
                piece.weight.grad = None if gradient is None else flat(gradient)[place.of_parameter]
            elif piece.parameter not in used:
                piece.weight.grad = None
            elif self.keeps_gradients:
                piece.weight.grad = bucket.flat[begin:end]
            else:
                piece.weight.grad = self._sums[piece.bucket, piece.owner].view(begin, end)


class _GradientBucket:
    """The gradients of a bucket, one after the other."""

    def __init__(self, index: int, layout: ShardLayout, parameters: Sequence[nn.Parameter]) -> None:
        self.index = index
        self.layout = layout.buckets[index]
        self.parameters = [parameters[number] for number in self.layout.parameters]
        self._memory: Tensor | None = None
        self._views: dict[Tensor, Tensor] = {}
        self.start_round(keep=True)

    @property
    def flat(self) -> Tensor:
        if self._memory is None:
            first = self.parameters[0]
            self._memory = torch.empty(self.layout.elements, dtype=first.dtype, device=first.device)
            views = self._memory.split(self.layout.sizes)
            self._views = {
                parameter: shaped_like(view, parameter) for parameter, view in zip(self.parameters, views, strict=True)
            }
        return self._memory

    def start_round(self, keep: bool) -> None:
        """Begin with the next micro-batch; without `keep` in other memory, since this one is on its way."""
        self.missing = set(self.parameters)
        if not keep:
            self._memory, self._views = None, {}

    def take(self, parameter: nn.Parameter, adds: bool = False) -> None:
        self.flat  # noqa: B018 - allocates the memory
        view, gradient = self._views[parameter], parameter.grad
        if gradient is not None and adds:
            view.add_(gradient)
        elif gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def fill_in_zeros(self) -> None:
        """Fill in zeros for parameters that have no gradient here; other ranks may have one."""
        self.flat  # noqa: B018 - allocates the memory
        for parameter in self.missing:
            if parameter.grad is None:
                self._views[parameter].zero_()


def _make_sums(layout: ShardLayout, rank: int, parameters: Sequence[nn.Parameter]) -> dict[tuple[int, int], Part]:
    """Make room for the sums of the parts that a rank keeps, by bucket and owner."""
    sums = {}
    for index, bucket in enumerate(layout.buckets):
        like = parameters[bucket.parameters[0]]
        for owner in layout.held_by(rank):
            begin, end = bucket.part(owner)
            sums[index, owner] = Part(begin, torch.zeros(end - begin, dtype=like.dtype, device=like.device))
    return sums


class UpdatedWeights(OuterSync):
    """Sends every rank's updated part to all others, and lets the program wait for what it uses."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        layout: ShardLayout,
        parameters: Sequence[nn.Parameter],
        exchange: PartExchange,
        exact: Mapping[tuple[int, int], ExactPart],
    ) -> None:
        self._world = world
        self._exchange = exchange
        # Exact weights by bucket and owner, where those that all ranks have are rounded.
        self._exact = exact
        flats = [flat(parameter) for parameter in parameters]
        self._weights = [Spread(bucket, [flats[number] for number in bucket.parameters]) for bucket in layout.buckets]
        self._bucket_of = {
            parameters[number]: index for index, bucket in enumerate(layout.buckets) for number in bucket.parameters
        }
        self._pending: dict[int, Future[float]] = {}
        self._intercept = WeightGuard(self._await) if can_intercept(model) else None
        self._started_at = 0.0
        self._waited_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether this rank has the weights of its last step."""
        return not self._pending

    def after_inner_step(self, step: int, last: bool) -> CommTimes:
        self._started_at = time.perf_counter()
        # What forward needs first is sent first.
        order = range(len(self._weights) - 1, -1, -1)
        for index in order:
            own = self._exact.get((index, self._world.rank), self._weights[index])
            exact = [part for (bucket, _), part in self._exact.items() if bucket == index]
            self._pending[index] = self._exchange.gather(index, own, self._weights[index], index == 0, exact)
        if last or self._intercept is None or not self._intercept.begin(self._bucket_of):
            self.complete()
            self._waited_s = 0.0
        now = time.perf_counter()
        return CommTimes(self._started_at, now - self._started_at, now - self._started_at)

    def take_waited_s(self) -> dict[str, float]:
        waited_s, self._waited_s = self._waited_s, 0.0
        return {"forward": waited_s}

    def complete(self) -> None:
        """Wait until all weights have arrived."""
        if self._intercept is not None:
            self._intercept.end()
        for index in list(self._pending):
            self._await(index)

    def close(self) -> None:
        if self._intercept is not None:
            self._intercept.end()

    def rewind(self, common_step: int, in_flight: int) -> None:
        """Take the weights as they are for the exact ones."""
        for part in self._exact.values():
            part.drop_rest()

    @contextmanager
    def common(self) -> Iterator[None]:
        self.complete()
        yield

    def _await(self, bucket: int) -> bool:
        pending = self._pending.get(bucket)
        if pending is not None:
            began = time.perf_counter()
            pending.result()
            self._waited_s += time.perf_counter() - began
            # Not before: a lost peer leaves this rank with weights that are not complete.
            del self._pending[bucket]
        return True

"""Outer synchronisation: replicas take inner steps alone and then agree on their parameters. See docs/sync.md.

    EveryStep         no outer steps: gradients are exchanged in every step, so replicas stay equal
    DiLoCo            all parameters at the end of a round: LocalSGD (the average), DiLoCo (Nesterov momentum)
    StreamingDiLoCo   fragment by fragment, while training continues

After each inner step the trainer calls `after_inner_step`. The outer gradient is the weighted sum over all ranks of
what the inner steps changed. The outer optimizer, SGD with Nesterov momentum as in torch, moves the *common* parameters
by it. Common parameters and outer momentum have the same bits on every rank; the moments of the inner optimizer stay
each rank's own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, groupby

import torch
from torch import Tensor, nn
from torch.futures import Future

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.errors import RunFailed
from shoal.sync.compression import make_compressor
from shoal.sync.compression.base import Bucket, Compressor
from shoal.sync.interruptible import await_future
from shoal.sync.step_stats import CommTimes, covered
from shoal.sync.world import World, barrier, with_second_group

# How many steps a rank may be ahead of the slowest: step times vary, and no rank waits for that.
LAG_STEPS = 8
# The part of its own parameters that a replica keeps when a fragment arrives; the rest is the common ones.
OWN_PART = 0.5
# Shards of one exchange under way at once, so that the wire is busy while the previous sum is stored. A format of two
# rounds finishes a shard when two more were handed over (`compression/reduce_scatter.py`), so it may not be less.
_WINDOW = 2

_NO_EXCHANGE = CommTimes(ready_at=0.0, tail_s=0.0, allreduce_s=None, wait_s=0.0)


class NonFiniteExchange(RunFailed):
    """The exchanged outer gradient is not finite, on every rank alike. The common parameters are unchanged."""


class OuterSync:
    """The interface of the trainer. This base class has no outer steps, see `EveryStep`."""

    round_steps: int = 1  # inner steps from one exchange of all parameters to the next
    lag_steps: int = 0  # how many steps ranks may be apart
    replicas_differ: bool = False  # replicas differ between exchanges, so that a checkpoint needs a part of every rank
    differs_now: bool = False  # their parameters differ just now
    commits_by_round: bool = False  # a step is done when its round is

    def after_inner_step(self, step: int, last: bool) -> CommTimes:
        """Do the exchange that is due after this inner step. After the `last` one replicas are equal to the bit."""
        return _NO_EXCHANGE

    def common(self) -> AbstractContextManager[None]:
        """Inside, the model holds the common parameters."""
        return nullcontext()

    def common_step(self, step: int) -> int:
        """Return the step of the common parameters when the replicas are at `step`."""
        return step

    @property
    def in_flight(self) -> int:
        """The fragments on their way between replicas, one bit each."""
        return 0

    def set_weight(self, weight: float) -> None:
        """Set this rank's part of the samples of the coming rounds."""

    def rewind(self, common_step: int, in_flight: int) -> None:
        """Make the model's parameters the common ones of that step; `state` then has room for what is to be loaded."""

    def roll_back(self, step: int) -> int:
        """After a failed exchange, put a state into the model that others can continue from; return its step."""
        return step

    def persistent_state(self) -> dict[str, Tensor]:
        """Return the part of `state` that outlives a world: nothing that was on its way."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return the common state beside the parameters. The tensors are those in use: filling them loads a state."""
        return self.persistent_state()

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's own state: the residuals of its compressor."""
        return {}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None: ...


class EveryStep(OuterSync):
    """Gradients are exchanged in every step."""


def make_outer_sync(config: SyncConfig, model: nn.Module, world: World, weight: float) -> OuterSync:
    """Return the outer synchronisation of the configuration. `weight` is this rank's part of the tokens of a round.

    LocalSGD on one rank is plain training: the average over one rank is that rank.
    """
    if not config.is_outer or (config.mode == "local" and world.size == 1):
        return EveryStep()
    optimizer = AVERAGE if config.mode == "local" else OuterOptimizer(config.outer_lr, config.outer_momentum)
    parameters = dict(model.named_parameters())
    fragments = [list(parameters)]
    if config.mode == "streaming":
        fragments = cut_fragments([(name, p.numel()) for name, p in parameters.items()], config.fragments)
        world = with_second_group(world, config.timeout_s * (1 + LAG_STEPS))
    shards = _make_shards(config, parameters, fragments, optimizer)
    compressor = make_compressor(config.wire, world, parameters)
    exchange = OuterExchange(world, compressor, weight, timed=config.measure != "off")
    if config.mode == "streaming":
        return StreamingDiLoCo(shards, exchange, config.round_steps, config.overlap_steps, optimizer)
    return DiLoCo(shards[0], exchange, config.round_steps, optimizer)


def _make_shards(
    config: SyncConfig, parameters: dict[str, nn.Parameter], fragments: list[list[str]], optimizer: OuterOptimizer
) -> list[list[OuterShard]]:
    """Cut each fragment into shards of the size of a bucket."""
    model_bytes = sum(parameter.nbytes for parameter in parameters.values())
    shard_bytes = int((config.bucket_mb or bucket_mb_for(model_bytes)) * 2**20)
    number = count()
    return [
        [
            OuterShard(next(number), {name: parameters[name] for name in shard}, optimizer)
            for shard in cut_shards([(name, parameters[name].nbytes) for name in names], shard_bytes)
        ]
        for names in fragments
    ]


class LocalSteps(OuterSync):
    """The common part of LocalSGD, DiLoCo and Streaming DiLoCo."""

    replicas_differ = True
    lag_steps = LAG_STEPS

    def __init__(
        self, shards: Sequence[OuterShard], exchange: OuterExchange, every: int, optimizer: OuterOptimizer
    ) -> None:
        self.round_steps = every
        self._shards = shards
        self._exchange = exchange
        self._optimizer = optimizer

    @contextmanager
    def common(self) -> Iterator[None]:
        for shard in self._shards:
            shard.swap()
        try:
            yield
        finally:
            for shard in self._shards:
                shard.swap()

    def set_weight(self, weight: float) -> None:
        self._exchange.weight = weight

    def rewind(self, common_step: int, in_flight: int) -> None:
        for shard in self._shards:
            shard.make_common()

    def roll_back(self, step: int) -> int:
        """Return to the common parameters: an incomplete round is repeated."""
        for shard in self._shards:
            shard.adopt()
        return self.common_step(step)

    def persistent_state(self) -> dict[str, Tensor]:
        return {name: tensor for shard in self._shards for name, tensor in shard.state().items()}

    def own_state(self) -> dict[str, Tensor]:
        return self._exchange.compressor.state()

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self._exchange.compressor.load_state(state)


class DiLoCo(LocalSteps):
    """LocalSGD and DiLoCo: all parameters at once at the end of each round.

    A training that ends inside a round ends with the plain average: momentum belongs to whole rounds, and would carry
    replicas far past what they learned in a part of one.
    """

    commits_by_round = True

    def __init__(
        self, shards: Sequence[OuterShard], exchange: OuterExchange, every: int, optimizer: OuterOptimizer
    ) -> None:
        super().__init__(shards, exchange, every, optimizer)
        self._common_step = 0

    def after_inner_step(self, step: int, last: bool) -> CommTimes:
        is_whole_round = step % self.round_steps == 0
        self.differs_now = not (is_whole_round or last)
        if not self.differs_now:
            self._exchange.exchange_all(self._shards, self._optimizer if is_whole_round else AVERAGE)
            self._common_step = step
        return self._exchange.take_times()

    def common_step(self, step: int) -> int:
        return self._common_step

    def rewind(self, common_step: int, in_flight: int) -> None:
        super().rewind(common_step, in_flight)
        self._common_step = common_step


class StreamingDiLoCo(LocalSteps):
    """Exchanges the model fragment by fragment, and no rank waits while one is on its way.

    A fragment sent after step b is applied after step b + overlap: the outer optimizer moves the common parameters, and
    each replica, which has trained on meanwhile, goes half of the way there. Fragments take turns, evenly spread over a
    round, so that the wire is used all the time instead of all at once. No step exchanges everything, so the common
    parameters count as those of the current step.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[OuterShard]],
        exchange: OuterExchange,
        every: int,
        overlap: int,
        optimizer: OuterOptimizer,
    ) -> None:
        super().__init__([shard for fragment in fragments for shard in fragment], exchange, every, optimizer)
        self._fragments = fragments
        self._overlap = overlap
        # The fragments on their way.
        self._pending: dict[int, list[AsyncExchange]] = {}
        self._is_final_exchange = False

    def after_inner_step(self, step: int, last: bool) -> CommTimes:
        for index in list(self._pending):
            if last or self._is_due(index, step - self._overlap):
                for pending in self._pending.pop(index):
                    pending.shard.outer_step(self._exchange.wait_for(pending), self._optimizer)
                    pending.shard.adopt(OWN_PART)
        if last:
            self._is_final_exchange = True
            self._exchange.exchange_all(self._shards, AVERAGE)
            self._is_final_exchange = False
        else:
            for index, fragment in enumerate(self._fragments):
                if self._is_due(index, step):
                    self._pending[index] = list(self._exchange.start(fragment))
        self.differs_now = not last
        return self._exchange.take_times()

    @property
    def in_flight(self) -> int:
        return sum(1 << index for index in self._pending)

    def rewind(self, common_step: int, in_flight: int) -> None:
        super().rewind(common_step, in_flight)
        self._pending = {
            index: [AsyncExchange.completed(shard, shard.outer_gradient(0.0)) for shard in fragment]
            for index, fragment in enumerate(self._fragments)
            if in_flight >> index & 1
        }

    def roll_back(self, step: int) -> int:
        """Keep this replica's parameters, because there is no common step to return to; drop fragments on their way.

        Only when sums of the final exchange have begun to replace the parameters, return to the common ones.
        """
        self._pending = {}
        if self._is_final_exchange:
            super().roll_back(step)
        return step

    def state(self) -> dict[str, Tensor]:
        """Return also the sums on their way: a resumed training applies them at the same step."""
        sums = {
            f"outer.sum.{index}.{number}": exchange.wait()
            for index, exchanges in self._pending.items()
            for number, exchange in enumerate(exchanges)
        }
        return self.persistent_state() | sums

    def _is_due(self, index: int, step: int) -> bool:
        return is_fragment_due(step, index, len(self._fragments), self.round_steps)


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD with Nesterov momentum. The defaults, a full step without momentum, give the plain average."""

    lr: float = 1.0
    momentum: float = 0.0


AVERAGE = OuterOptimizer()


class OuterShard:
    """Parameters that travel together, with a copy of their common values, and with momentum another one."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], optimizer: OuterOptimizer) -> None:
        self.index = index
        self._own = dict(parameters)
        self._common = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with_momentum = self._common if optimizer.momentum else {}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in with_momentum.items()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._own.values())

    @torch.no_grad()
    def outer_gradient(self, weight: float) -> Tensor:
        """Return weight · (common - own), which summed over the ranks is the outer gradient."""
        flat = next(iter(self._common.values())).new_empty(sum(tensor.numel() for tensor in self._common.values()))
        for part, common, own in zip(self._parts(flat), self._common.values(), self._own.values(), strict=True):
            torch.sub(common, own, out=part).mul_(weight)
        return flat

    def outer_step(self, gradient: Tensor, optimizer: OuterOptimizer) -> None:
        """Move the common parameters. The gradient is overwritten."""
        _refuse_nonfinite(gradient)
        self._step(list(self._parts(gradient)), optimizer)

    @torch.no_grad()
    def stash(self, gradient: Tensor) -> None:
        """Keep the summed gradient in place of the own parameters, until all other shards have theirs, too."""
        _refuse_nonfinite(gradient)
        for own, part in zip(self._own.values(), self._parts(gradient), strict=True):
            own.copy_(part)

    def outer_step_by_stash(self, optimizer: OuterOptimizer) -> None:
        self._step([own.detach() for own in self._own.values()], optimizer)

    @torch.no_grad()
    def _step(self, gradients: list[Tensor], optimizer: OuterOptimizer) -> None:
        for (name, common), gradient in zip(self._common.items(), gradients, strict=True):
            if optimizer.momentum:
                momentum = self._momentum[name].mul_(optimizer.momentum).add_(gradient)
                gradient.add_(momentum, alpha=optimizer.momentum)
            common.add_(gradient, alpha=-optimizer.lr)

    @torch.no_grad()
    def adopt(self, own_part: float = 0.0) -> None:
        """Set own = own_part · own + (1 - own_part) · common."""
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            if own_part:
                own.mul_(own_part).add_(common, alpha=1 - own_part)
            else:
                own.copy_(common)

    @torch.no_grad()
    def make_common(self) -> None:
        """Set common = own."""
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            common.copy_(own)

    def swap(self) -> None:
        """Exchange own and common parameters; a second call undoes it."""
        for name, own in self._own.items():
            own.data, self._common[name] = self._common[name], own.data

    def state(self) -> dict[str, Tensor]:
        return {f"outer.momentum.{name}": tensor for name, tensor in self._momentum.items()}

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        shapes = [tensor.shape for tensor in self._common.values()]
        for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True):
            yield part.view(shape)


def _refuse_nonfinite(gradient: Tensor) -> None:
    """Raise, on every rank alike: such values must not reach a checkpoint."""
    if not torch.isfinite(gradient.sum()):
        raise NonFiniteExchange(
            "the parameters that replicas exchanged are not finite",
            why="one of them diverged, or a difference was too large for the wire format",
            fix="start a new run with a lower rate (--set train.lr=…) or with --wire fp32",
        )


class AsyncExchange:
    """The outer gradient of one shard on its way to become the sum over the ranks."""

    def __init__(self, shard: OuterShard, future: Future[Tensor]) -> None:
        self.shard = shard
        self.span = [time.perf_counter(), 0.0]
        self._future = future.then(self._note_end)

    @classmethod
    def completed(cls, shard: OuterShard, gradient: Tensor) -> AsyncExchange:
        """Return an exchange that had ended before the training was interrupted."""
        done: Future[Tensor] = Future()
        done.set_result(gradient)
        return cls(shard, done)

    def wait(self) -> Tensor:
        return await_future(self._future)

    def _note_end(self, done: Future[Tensor]) -> Tensor:
        self.span[1] = time.perf_counter()
        return done.value()


class OuterExchange:
    """Exchanges shards and measures how long this rank was blocked, and how much of that because a peer was late."""

    def __init__(self, world: World, compressor: Compressor, weight: float, timed: bool = True) -> None:
        self.compressor = compressor
        self._world = world
        self.weight = weight  # This rank's part of the samples of a round.
        self._timed = timed
        self._blocked_s = 0.0
        self._wait_s = 0.0
        self._spans: list[list[float]] = []

    def start(self, shards: Sequence[OuterShard]) -> Iterator[AsyncExchange]:
        """Start exchanges one by one as they are requested: the gradient of a shard is made when it is sent."""
        for shard in shards:
            gradient = shard.outer_gradient(self.weight)
            bucket = Bucket(shard.index, gradient, shard.parameters, is_last=shard is shards[-1])
            yield AsyncExchange(shard, self.compressor(bucket))

    def wait_for(self, exchange: AsyncExchange) -> Tensor:
        began = time.perf_counter()
        gradient = exchange.wait()
        self._blocked_s += time.perf_counter() - began
        self._spans.append(exchange.span)
        return gradient

    def exchange_all(self, shards: Sequence[OuterShard], optimizer: OuterOptimizer) -> None:
        """Exchange all shards while the training waits, a few at a time to save memory, and take the outer step.

        No common parameter changes before all sums are here: a peer that leaves halfway leaves no replica between two
        rounds. The sums are stashed in place of the replica's own parameters, which are replaced anyway.
        """
        # One barrier per round tells a late peer from a slow network.
        began = time.perf_counter()
        barrier(self._world)
        waited_s = time.perf_counter() - began
        self._wait_s += waited_s
        self._blocked_s += waited_s
        pending: deque[AsyncExchange] = deque()
        for exchange in self.start(shards):
            pending.append(exchange)
            if len(pending) > _WINDOW:
                self._stash(pending.popleft())
        while pending:
            self._stash(pending.popleft())
        for shard in shards:
            shard.outer_step_by_stash(optimizer)
            shard.adopt()

    def take_times(self) -> CommTimes:
        """Return the times since the last call."""
        spans, self._spans = sorted(self._spans), []
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        wait_s, self._wait_s = self._wait_s, 0.0
        return CommTimes(
            ready_at=time.perf_counter() - blocked_s,
            tail_s=blocked_s,
            allreduce_s=covered(spans) if spans and self._timed else None,
            wait_s=wait_s,
        )

    def _stash(self, exchange: AsyncExchange) -> None:
        exchange.shard.stash(self.wait_for(exchange))


# How a model is cut for outer exchanges, and when each fragment is due. Pure: names, sizes and step numbers only.

Sized = Sequence[tuple[str, int]]


def cut_fragments(parameters: Sized, fragments: int) -> list[list[str]]:
    """Cut names, in their order, into at most `fragments` runs of whole blocks, about equal in size and never empty."""
    total = sum(size for _, size in parameters)
    cut: dict[int, list[str]] = {}
    before = 0
    for _, members in groupby(parameters, key=lambda parameter: _block_of(parameter[0])):
        names, sizes = zip(*members, strict=True)
        middle = before + sum(sizes) / 2
        cut.setdefault(int(middle * fragments / total), []).extend(names)
        before += sum(sizes)
    return list(cut.values())


def cut_shards(parameters: Sized, shard_bytes: int) -> list[list[str]]:
    """Cut names, in their order, into shards of at most `shard_bytes`; a larger parameter is a shard by itself."""
    shards: list[list[str]] = []
    filled_bytes = 0
    for name, size in parameters:
        if not shards or filled_bytes + size > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += size
    return shards


def is_fragment_due(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Return whether a fragment is sent after this step: spread evenly over a round, the last one at its end."""
    return (step - (fragment + 1) * every // fragments) % every == 0


def _block_of(name: str) -> str:
    """Return `blocks.3` for `blocks.3.attention.out.bias`, and `token` for `token.weight`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first

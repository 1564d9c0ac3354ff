"""Outer steps: replicas train alone for a round of steps, and then agree on what they learned. See docs/sync.md.

    EveryStep   nothing to do: gradients are exchanged in every step, so replicas never part
    Rounds      all parameters at the end of a round: LocalSGD (the average), DiLoCo (Nesterov momentum)
    Streaming   fragment by fragment, while training goes on (`sync/streaming.py`)

After each step of the inner optimizer the trainer calls `after`. What is common to all replicas (parameters and outer
momentum) has the same bits on every rank; the inner moments stay each rank's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.futures import Future

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.errors import RunFailed
from shoal.sync.compression import make_wire
from shoal.sync.compression.base import Bucket, Compressor
from shoal.sync.step_stats import CommTimes, covered
from shoal.sync.world import World, barrier, beside

# SECTION sync/piece
# A piece of the model in outer steps: what is common to all replicas, and how far each has gone from it.
#
# gap       weight · (common - own), summed over the world: the outer gradient
# descend   the outer optimizer, SGD with Nesterov momentum as torch has it, moves what is common
# adopt     own = mix · own + (1 - mix) · common


class NotFinite(RunFailed):
    """What replicas exchanged is no number, on every rank alike; what they have in common is untouched by it."""


@dataclass(frozen=True)
class OuterStep:
    """How far an outer step goes along the outer gradient. One all the way, without momentum, is the plain average."""

    lr: float = 1.0
    momentum: float = 0.0


AVERAGE = OuterStep()


class OuterShard:
    """Some parameters that travel together. Beside the model it holds one copy of them, and with momentum another."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], descent: OuterStep) -> None:
        self.index = index
        self._own = dict(parameters)
        self._common = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with_momentum = self._common if descent.momentum else {}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in with_momentum.items()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._own.values())

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self._common.values())

    @torch.no_grad()
    def gap(self, weight: float) -> Tensor:
        flat = next(iter(self._common.values())).new_empty(self.size)
        for part, common, own in zip(self._parts(flat), self._common.values(), self._own.values(), strict=True):
            torch.sub(common, own, out=part).mul_(weight)
        return flat

    def descend(self, gap: Tensor, descent: OuterStep) -> None:
        """`gap` is used up."""
        _refuse_nonfinite(gap)
        self._descend(list(self._parts(gap)), descent)

    @torch.no_grad()
    def put_by(self, gap: Tensor) -> None:
        """Keeps the summed gap where the replica's own parameters were, until the other pieces have theirs, too."""
        _refuse_nonfinite(gap)
        for own, part in zip(self._own.values(), self._parts(gap), strict=True):
            own.copy_(part)

    def descend_by_own(self, descent: OuterStep) -> None:
        self._descend([own.detach() for own in self._own.values()], descent)

    @torch.no_grad()
    def _descend(self, gaps: list[Tensor], descent: OuterStep) -> None:
        for (name, common), part in zip(self._common.items(), gaps, strict=True):
            if descent.momentum:
                momentum = self._momentum[name].mul_(descent.momentum).add_(part)
                part.add_(momentum, alpha=descent.momentum)
            common.add_(part, alpha=-descent.lr)

    @torch.no_grad()
    def adopt(self, mix: float = 0.0) -> None:
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            if mix:
                own.mul_(mix).add_(common, alpha=1 - mix)
            else:
                own.copy_(common)

    @torch.no_grad()
    def rewind(self) -> None:
        """What the model holds now is common."""
        for own, common in zip(self._own.values(), self._common.values(), strict=True):
            common.copy_(own)

    def swap(self) -> None:
        """The model gets what is common and this piece keeps what is the replica's own; twice is back again."""
        for name, own in self._own.items():
            own.data, self._common[name] = self._common[name], own.data

    def state(self) -> dict[str, Tensor]:
        return {f"outer.momentum.{name}": tensor for name, tensor in self._momentum.items()}

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        shapes = [tensor.shape for tensor in self._common.values()]
        for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True):
            yield part.view(shape)


def _refuse_nonfinite(gap: Tensor) -> None:
    """The same on every rank; it must not reach a checkpoint."""
    if not torch.isfinite(gap.sum()):
        raise NotFinite(
            "the parameters that replicas exchanged are not finite",
            why="one of them diverged, or a difference was too large for the wire format",
            fix="start a new run with a lower rate (--set train.lr=…) or with --wire fp32",
        )


# SECTION sync/flight
# Pieces of the model on their way over the wire, and how long that took.


# Pieces of one exchange under way at once: the wire is busy while the one before is worked in. A format of two rounds
# ends a piece when two more were handed over (`wires/lane.py`), so it may not be less.
_WINDOW = 2


class AsyncExchange:
    """The gap of one piece, becoming the sum over the world."""

    def __init__(self, piece: OuterShard, future: Future[Tensor]) -> None:
        self.piece = piece
        self.span = [time.perf_counter(), 0.0]
        self._future = future.then(self._note_end)

    @classmethod
    def over(cls, piece: OuterShard, gap: Tensor) -> AsyncExchange:
        """One that landed before the training was interrupted."""
        done: Future[Tensor] = Future()
        done.set_result(gap)
        return cls(piece, done)

    def land(self) -> Tensor:
        return self._future.wait()

    def _note_end(self, done: Future[Tensor]) -> Tensor:
        self.span[1] = time.perf_counter()
        return done.value()


class OuterExchange:
    """Sends pieces and books the time: how long this rank was blocked, and how much of that because a peer was late."""

    def __init__(self, world: World, wire: Compressor, weight: float, timed: bool = True) -> None:
        self.wire = wire
        self._world = world
        self._weight = weight
        self._timed = timed
        self._blocked_s = 0.0
        self._wait_s = 0.0
        self._spans: list[list[float]] = []

    def begin(self, pieces: Sequence[OuterShard]) -> Iterator[AsyncExchange]:
        """One by one, as they are asked for: the gap of a piece is made when it is sent."""
        for piece in pieces:
            bucket = Bucket(piece.index, piece.gap(self._weight), piece.parameters, is_last=piece is pieces[-1])
            yield AsyncExchange(piece, self.wire(bucket))

    def land(self, flight: AsyncExchange) -> Tensor:
        began = time.perf_counter()
        gap = flight.land()
        self._blocked_s += time.perf_counter() - began
        self._spans.append(flight.span)
        return gap

    def everything(self, pieces: Sequence[OuterShard], descent: OuterStep) -> None:
        """All pieces now, everybody waiting: a few under way at a time, so that their gaps need little memory.

        Nothing that is common changes before all sums are here: a peer that leaves in the middle leaves no replica
        between two rounds. The sums wait in place of the replica's own parameters, which they replace anyway.
        """
        self._meet()
        flights: deque[AsyncExchange] = deque()
        for flight in self.begin(pieces):
            flights.append(flight)
            if len(flights) > _WINDOW:
                self._put_by(flights.popleft())
        while flights:
            self._put_by(flights.popleft())
        for piece in pieces:
            piece.descend_by_own(descent)
            piece.adopt()

    def times(self) -> CommTimes:
        """Since the last time somebody asked."""
        spans, self._spans = sorted(self._spans), []
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        wait_s, self._wait_s = self._wait_s, 0.0
        return CommTimes(
            ready_at=time.perf_counter() - blocked_s,
            tail_s=blocked_s,
            allreduce_s=covered(spans) if spans and self._timed else None,
            wait_s=wait_s,
        )

    def _meet(self) -> None:
        """One message a round, and it tells a late peer from a slow network."""
        began = time.perf_counter()
        barrier(self._world)
        waited_s = time.perf_counter() - began
        self._wait_s += waited_s
        self._blocked_s += waited_s

    def _put_by(self, flight: AsyncExchange) -> None:
        flight.piece.put_by(self.land(flight))


# So many steps may a rank be ahead of the slowest: their pace varies from step to step, and nobody waits for that.
LAG_STEPS = 8

_NOTHING = CommTimes(ready_at=0.0, tail_s=0.0, allreduce_s=None, wait_s=0.0)


class OuterSync(Protocol):
    """`round_steps`: steps from one exchange of all parameters to the next. `lag_steps`: how far ranks may drift
    apart. `drifts`: replicas go their own ways between exchanges, so that a checkpoint needs a part of every rank;
    `apart`: they have other parameters just now; `in_rounds`: a step is done when its round is."""

    round_steps: int
    lag_steps: int
    drifts: bool
    apart: bool
    in_rounds: bool

    def after(self, step: int, last: bool) -> CommTimes:
        """What is due after this step. After the `last` one replicas are equal to the bit."""

    def common(self) -> AbstractContextManager[None]:
        """Inside, the model holds what is common to all replicas."""

    def common_step(self, step: int) -> int:
        """How far the common state has come when the replicas have come to `step`."""

    @property
    def flying(self) -> int:
        """What is on its way between replicas, a bit a fragment."""

    def rewind(self, common_step: int, flying: int) -> None:
        """What the model holds is common and has come so far; `state` then has room for what is to be loaded."""

    def retreat(self, step: int) -> int:
        """From an exchange that failed: the model holds what others could go on from, and that is of the step that is
        returned."""

    def lasting(self) -> dict[str, Tensor]:
        """What of `state` outlives a world: nothing that was on its way."""

    def state(self) -> dict[str, Tensor]:
        """What is common beside the parameters. The tensors are those in use: filling them loads a state."""

    def own_state(self) -> dict[str, Tensor]: ...
    def load_own_state(self, state: Mapping[str, Tensor]) -> None: ...


class EveryStep:
    round_steps = 1
    lag_steps = 0
    drifts = False
    apart = False
    in_rounds = False
    flying = 0

    def after(self, step: int, last: bool) -> CommTimes:
        return _NOTHING

    def common(self) -> AbstractContextManager[None]:
        return nullcontext()

    def common_step(self, step: int) -> int:
        return step

    def rewind(self, common_step: int, flying: int) -> None:
        pass

    def retreat(self, step: int) -> int:
        return step

    def lasting(self) -> dict[str, Tensor]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def own_state(self) -> dict[str, Tensor]:
        return {}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class LocalSteps(ABC):
    """What all ways have in common in which replicas part and meet again."""

    drifts = True
    in_rounds = False
    lag_steps = LAG_STEPS

    def __init__(self, pieces: Sequence[OuterShard], exchange: OuterExchange, every: int, descent: OuterStep) -> None:
        self.round_steps = every
        self._pieces = pieces
        self._exchange = exchange
        self._descent = descent
        self.apart = False

    @contextmanager
    def common(self) -> Iterator[None]:
        for piece in self._pieces:
            piece.swap()
        try:
            yield
        finally:
            for piece in self._pieces:
                piece.swap()

    def rewind(self, common_step: int, flying: int) -> None:
        for piece in self._pieces:
            piece.rewind()

    def retreat(self, step: int) -> int:
        """Half a round would be half a training: it is done again, from what all have in common."""
        for piece in self._pieces:
            piece.adopt()
        return self.common_step(step)

    @abstractmethod
    def common_step(self, step: int) -> int: ...

    def lasting(self) -> dict[str, Tensor]:
        return {name: tensor for piece in self._pieces for name, tensor in piece.state().items()}

    def state(self) -> dict[str, Tensor]:
        return self.lasting()

    def own_state(self) -> dict[str, Tensor]:
        return self._exchange.wire.state()

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self._exchange.wire.load_state(state)


class DiLoCo(LocalSteps):
    """LocalSGD and DiLoCo: everything at once at the end of each round.

    A training that ends inside a round ends with the plain average: momentum belongs to whole rounds, and would carry
    replicas far past what they learned in a part of one.
    """

    flying = 0
    in_rounds = True

    def __init__(self, pieces: Sequence[OuterShard], exchange: OuterExchange, every: int, descent: OuterStep) -> None:
        super().__init__(pieces, exchange, every, descent)
        self._common_step = 0

    def after(self, step: int, last: bool) -> CommTimes:
        is_whole = step % self.round_steps == 0
        self.apart = not (is_whole or last)
        if not self.apart:
            self._exchange.everything(self._pieces, self._descent if is_whole else AVERAGE)
            self._common_step = step
        return self._exchange.times()

    def common_step(self, step: int) -> int:
        return self._common_step

    def rewind(self, common_step: int, flying: int) -> None:
        super().rewind(common_step, flying)
        self._common_step = common_step


# SECTION sync/fragments
# How a model is cut for outer exchanges, and when each part has its turn. Pure: names, sizes and step numbers only.


Sized = Sequence[tuple[str, int]]


def cut_blocks(parameters: Sized, fragments: int) -> list[list[str]]:
    """Names in their order, in at most `fragments` runs of whole blocks, about equal in size and never empty."""
    total = sum(size for _, size in parameters)
    cut: dict[int, list[str]] = {}
    before = 0
    for _, members in groupby(parameters, key=lambda parameter: _block(parameter[0])):
        names, sizes = zip(*members, strict=True)
        middle = before + sum(sizes) / 2
        cut.setdefault(int(middle * fragments / total), []).extend(names)
        before += sum(sizes)
    return list(cut.values())


def cut_pieces(parameters: Sized, piece_bytes: int) -> list[list[str]]:
    """Names in their order, so many that a piece stays below `piece_bytes`; a larger parameter is a piece by itself."""
    pieces: list[list[str]] = []
    filled = 0
    for name, size in parameters:
        if not pieces or filled + size > piece_bytes:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces


def is_sent_at(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Fragments are spread evenly over a round, the last one is sent at its end."""
    return (step - (fragment + 1) * every // fragments) % every == 0


def _block(name: str) -> str:
    """`blocks.3.attention.out.bias` belongs to `blocks.3`, `token.weight` to `token`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


# SECTION sync/streaming
# Streaming DiLoCo: the model is exchanged fragment by fragment, and nobody waits while one is on its way.
#
# A fragment sent after step b is worked in after step b + overlap: the outer optimizer moves what is common, and each
# replica, which has trained on meanwhile, goes half of the way there. Fragments take turns, evenly spread over a round,
# so that the wire is used all the time instead of all at once.


# What a replica keeps of its own when a fragment comes back; the rest is what all agreed on.
MIX = 0.5


class Streaming(LocalSteps):
    def __init__(
        self,
        fragments: Sequence[Sequence[OuterShard]],
        exchange: OuterExchange,
        every: int,
        overlap: int,
        descent: OuterStep,
    ) -> None:
        super().__init__([piece for fragment in fragments for piece in fragment], exchange, every, descent)
        self._fragments = fragments
        self._overlap = overlap
        self._flying: dict[int, list[AsyncExchange]] = {}
        self._is_ending = False

    def after(self, step: int, last: bool) -> CommTimes:
        for index in list(self._flying):
            if last or self._is_sent(index, step - self._overlap):
                self._work_in(index)
        if last:
            self._is_ending = True
            self._exchange.everything(self._pieces, AVERAGE)
            self._is_ending = False
        else:
            self._send(step)
        self.apart = not last
        return self._exchange.times()

    def common_step(self, step: int) -> int:
        """There is no step at which everything was exchanged; what is common goes along with the training."""
        return step

    @property
    def flying(self) -> int:
        return sum(1 << index for index in self._flying)

    def rewind(self, common_step: int, flying: int) -> None:
        super().rewind(common_step, flying)
        self._flying = {
            index: [AsyncExchange.over(piece, piece.gap(0.0)) for piece in fragment]
            for index, fragment in enumerate(self._fragments)
            if flying >> index & 1
        }

    def retreat(self, step: int) -> int:
        """There is no step to go back to. What this replica has learned stays, unless the sums of the last exchange
        have begun to take its place; what was on its way is lost."""
        self._flying = {}
        if self._is_ending:
            super().retreat(step)
        return step

    def state(self) -> dict[str, Tensor]:
        """With the sums that were on their way: whoever resumes works them in at the same step."""
        sums = {
            f"outer.sum.{index}.{number}": flight.land()
            for index, flights in self._flying.items()
            for number, flight in enumerate(flights)
        }
        return self.lasting() | sums

    def _send(self, step: int) -> None:
        for index, fragment in enumerate(self._fragments):
            if self._is_sent(index, step):
                self._flying[index] = list(self._exchange.begin(fragment))

    def _work_in(self, index: int) -> None:
        for flight in self._flying.pop(index):
            flight.piece.descend(self._exchange.land(flight), self._descent)
            flight.piece.adopt(MIX)

    def _is_sent(self, index: int, step: int) -> bool:
        return is_sent_at(step, index, len(self._fragments), self.round_steps)


# SECTION sync/agreement
# How replicas agree on parameters now and then, from the configuration.


def make_outer(config: SyncConfig, model: nn.Module, world: World, weight: float) -> OuterSync:
    """`weight` is this rank's part of the tokens of a round. An average over one rank is that rank: plain training."""
    if not config.is_outer or (config.mode == "local" and world.size == 1):
        return EveryStep()
    descent = AVERAGE if config.mode == "local" else OuterStep(config.outer_lr, config.outer_momentum)
    parameters = dict(model.named_parameters())
    if config.mode == "streaming":
        cut = cut_blocks([(name, parameter.numel()) for name, parameter in parameters.items()], config.fragments)
        fragments = _pieces(config, parameters, cut, descent)
        world = beside(world, config.timeout_s * (1 + LAG_STEPS))
        exchange = _exchange(config, world, weight, parameters)
        return Streaming(fragments, exchange, config.round_steps, config.overlap_steps, descent)
    [pieces] = _pieces(config, parameters, [list(parameters)], descent)
    return DiLoCo(pieces, _exchange(config, world, weight, parameters), config.round_steps, descent)


def _exchange(config: SyncConfig, world: World, weight: float, parameters: dict[str, nn.Parameter]) -> OuterExchange:
    return OuterExchange(world, make_wire(config.wire, world, parameters), weight, timed=config.measure != "off")


def _pieces(
    config: SyncConfig, parameters: dict[str, nn.Parameter], cut: Sequence[Sequence[str]], descent: OuterStep
) -> list[list[OuterShard]]:
    model_bytes = sum(parameter.nbytes for parameter in parameters.values())
    piece_bytes = int((config.bucket_mb or bucket_mb_for(model_bytes)) * 2**20)
    number = count()

    def pieces_of(names: Sequence[str]) -> Iterator[OuterShard]:
        for chosen in cut_pieces([(name, parameters[name].nbytes) for name in names], piece_bytes):
            yield OuterShard(next(number), {name: parameters[name] for name in chosen}, descent)

    return [list(pieces_of(names)) for names in cut]

"""What a wire is handed, and what it gives back."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.errors import CheckpointError
from shoal.sync.compression.native import load_kernels
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.world import World

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: `flat` holds those of `parameters`, one behind the other.

    DDP makes other buckets after the first backward, so what outlives a step belongs to a parameter, never to an index.
    `is_last`: no other bucket follows before somebody waits for this one.
    """

    index: int
    flat: Tensor
    parameters: Sequence[Tensor]
    is_last: bool = True


class Compressor(Protocol):
    """Made once per run. Called with a bucket it gives a future of `flat` holding the *sum*, the same bits on every
    rank; nobody divides by the world size, because the loss was already divided by the global token count."""

    def __call__(self, bucket: Bucket) -> Future[Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: State) -> None: ...


class InterruptibleCompressor:
    """A wire whose sums end, at the latest, with the generation."""

    def __init__(self, wire: Compressor, release: GroupInterrupt) -> None:
        self._wire = wire
        self._release = release

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._release.guard(self._wire(bucket))

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)


class NoState:
    """What a format that forgets everything after a step has to keep: nothing."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: State) -> None:
        check_names({}, state)


class CompressorState:
    """What a rank has to remember is in its wire format."""

    _wire: Compressor

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)


def load_tensors(own: Mapping[str, Tensor], state: State) -> None:
    """Nothing at all is a fresh start; anything else must be the whole state of this model."""
    check_names(own, state)
    for name, saved in state.items():
        own[name].copy_(saved)


def check_names(own: Mapping[str, Tensor], state: State) -> None:
    if not state or {name: saved.shape for name, saved in state.items()} == {n: t.shape for n, t in own.items()}:
        return
    odd = sorted(state.keys() ^ own.keys()) or [name for name in own if own[name].shape != state[name].shape]
    raise CheckpointError(
        f"the checkpoint keeps another state of the wire than this run: {odd[0]}",
        why="it was written with another model or another sync.wire",
        fix="resume with the settings it was written with, or start a new run",
    )


def future_of(work: dist.Work | None) -> Future[list[Tensor]]:
    return begun(work).get_future()


def begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - only a rank outside the group gets None
    return work


# SECTION sync/wires/desks
# Room that a bucket needs in every step, made once.


T = TypeVar("T")


class BufferPool(Generic[T]):
    """One for each bucket, until DDP fills its buckets differently: after the first backward it knows in which order
    gradients come."""

    def __init__(self, make: Callable[[Bucket], T]) -> None:
        self._make = make
        self._kept: dict[int, tuple[tuple[int, ...], T]] = {}

    def of(self, bucket: Bucket) -> T:
        members = tuple(map(id, bucket.parameters))
        kept = self._kept.get(bucket.index)
        if kept is None or kept[0] != members:
            # Those behind it are of the old order too; there may be fewer of the new one.
            self._kept = {index: each for index, each in self._kept.items() if index < bucket.index}
            kept = self._kept[bucket.index] = (members, self._make(bucket))
        return kept[1]


# SECTION sync/wires/whole
# Formats that gloo adds up by itself: fp32 as it is, and fp16.


_FP16_SCALE = 256.0
# Measured on an ARM core, nanoseconds a number to fp16 and back: torch 7.5 and 2.1, numpy 1.0 and 0.5, our kernel 0.24
# and 0.26, which is what a copy takes.
TORCH_GOES_ONE_BY_ONE = platform.machine() == "aarch64"


class Fp32(NoState):
    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        work = dist.all_reduce(bucket.flat, group=self._world.group, async_op=True)
        return future_of(work).then(lambda done: done.value()[0])


class Fp16(NoState):
    """Half the bytes and 11 bits of precision. All ranks get the same bits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._halves = BufferPool(lambda bucket: torch.empty_like(bucket.flat, dtype=torch.float16))
        if TORCH_GOES_ONE_BY_ONE:
            load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        half = self._halves.of(bucket)
        to_half(bucket.flat, half)
        work = dist.all_reduce(half, group=self._world.group, async_op=True)
        return future_of(work).then(lambda done: from_half(done.value()[0], bucket.flat))


def to_half(full: Tensor, half: Tensor) -> Tensor:
    """Mean gradients are small: unscaled, most lie below 6e-5, where fp16 loses bit after bit. A power of two moves
    them up without rounding; a sum over 255 overflows, and the step is refused for its infinite norm."""
    if full.device.type != "cpu" or not TORCH_GOES_ONE_BY_ONE:
        return half.copy_(full.mul(_FP16_SCALE))
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.to_half(full, half, _FP16_SCALE)
    else:
        _multiply(full, _FP16_SCALE, half)
    return half


def from_half(half: Tensor, full: Tensor) -> Tensor:
    if full.device.type != "cpu" or not TORCH_GOES_ONE_BY_ONE:
        return full.copy_(half).mul_(1 / _FP16_SCALE)
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.from_half(half, full, 1 / _FP16_SCALE)
    else:
        _multiply(half, 1 / _FP16_SCALE, full)
    return full


def _multiply(numbers: Tensor, factor: float, into: Tensor) -> None:
    """In fp32, whatever comes in and goes out."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(numbers.numpy(), np.float32(factor), out=into.numpy(), dtype=np.float32, casting="same_kind")

"""The interface of a compressor, and the formats that gloo's all-reduce sums by itself: fp32 and fp16."""

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
from shoal.sync.helper_threads import compute_alone_in_foreign_thread
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.world import World

State = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    DDP makes other buckets after the first backward, so state that outlives a step belongs to a parameter, never to an
    index.
    """

    index: int
    flat: Tensor  # the gradients of `parameters`, one after the other
    parameters: Sequence[Tensor]
    is_last: bool = True  # no other bucket follows before this one is waited for


class Compressor(Protocol):
    """Sums buckets over the ranks. Made once per run."""

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        """Return a future of `bucket.flat` with the *sum* over the ranks, with the same bits on every rank.

        It is not divided by the world size, because the loss was already divided by the global token count.
        """

    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: State) -> None: ...


class NoState:
    """For a format that keeps nothing from step to step."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: State) -> None:
        check_names({}, state)


class CompressorState:
    """For a class whose whole state is that of its compressor."""

    _compressor: Compressor | NoState

    def state(self) -> dict[str, Tensor]:
        return self._compressor.state()

    def load_state(self, state: State) -> None:
        self._compressor.load_state(state)


class InterruptibleCompressor(CompressorState):
    """A compressor whose sums end, at the latest, with the generation."""

    def __init__(self, compressor: Compressor, release: GroupInterrupt) -> None:
        self._compressor: Compressor = compressor
        self._release = release

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._release.guard(self._compressor(bucket))


def load_tensors(own: Mapping[str, Tensor], state: State) -> None:
    """Copy a saved state. An empty one is a fresh start; any other must be the whole state of this model."""
    check_names(own, state)
    for name, saved in state.items():
        own[name].copy_(saved)


def check_names(own: Mapping[str, Tensor], state: State) -> None:
    if not state or {name: saved.shape for name, saved in state.items()} == {n: t.shape for n, t in own.items()}:
        return
    different = sorted(state.keys() ^ own.keys()) or [name for name in own if own[name].shape != state[name].shape]
    raise CheckpointError(
        f"the checkpoint keeps another state of the wire than this run: {different[0]}",
        why="it was written with another model or another sync.wire",
        fix="resume with the settings it was written with, or start a new run",
    )


def begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - only a rank outside the group gets None
    return work


class BufferPool(Generic[T]):
    """One set of buffers per bucket, made once and reused until DDP rearranges its buckets after the first backward."""

    def __init__(self, make: Callable[[Bucket], T]) -> None:
        self._make = make
        # By bucket index: the identities of the bucket's parameters, and the buffers.
        self._kept: dict[int, tuple[tuple[int, ...], T]] = {}

    def of(self, bucket: Bucket) -> T:
        members = tuple(map(id, bucket.parameters))
        kept = self._kept.get(bucket.index)
        if kept is None or kept[0] != members:
            # Later buckets belong to the old arrangement too, and the new one may have fewer.
            self._kept = {index: buffers for index, buffers in self._kept.items() if index < bucket.index}
            kept = self._kept[bucket.index] = (members, self._make(bucket))
        return kept[1]


class Fp32(NoState):
    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        work = begun(dist.all_reduce(bucket.flat, group=self._world.group, async_op=True))
        return work.get_future().then(lambda done: done.value()[0])


# Mean gradients are small: unscaled, most lie below 6e-5, where fp16 loses precision. A power of two scales them
# without rounding. A sum over 255 overflows, and the step is refused for its infinite norm.
_FP16_SCALE = 256.0
# Measured on an ARM core, nanoseconds per number to fp16 and back: torch 7.5 and 2.1, numpy 1.0 and 0.5, the kernel of
# `kernels.cpp` 0.24 and 0.26, which is what a copy takes.
TORCH_FP16_IS_SLOW = platform.machine() == "aarch64"


class Fp16(NoState):
    """Half the bytes and 11 bits of precision. All ranks get the same bits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._halves = BufferPool(lambda bucket: torch.empty_like(bucket.flat, dtype=torch.float16))
        if TORCH_FP16_IS_SLOW:
            load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        half = to_half(bucket.flat, self._halves.of(bucket))
        work = begun(dist.all_reduce(half, group=self._world.group, async_op=True))

        def decode(done: Future[list[Tensor]]) -> Tensor:
            compute_alone_in_foreign_thread()
            return from_half(done.value()[0], bucket.flat)

        decoded: Future[Tensor] = work.get_future().then(decode)
        return decoded


def to_half(full: Tensor, half: Tensor) -> Tensor:
    if full.device.type != "cpu" or not TORCH_FP16_IS_SLOW:
        return half.copy_(full.mul(_FP16_SCALE))
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.to_half(full, half, _FP16_SCALE)
    else:
        _multiply_in_fp32(full, _FP16_SCALE, half)
    return half


def from_half(half: Tensor, full: Tensor) -> Tensor:
    if full.device.type != "cpu" or not TORCH_FP16_IS_SLOW:
        return full.copy_(half).mul_(1 / _FP16_SCALE)
    if (kernels := load_kernels()) is not None and kernels.has_halves:
        kernels.from_half(half, full, 1 / _FP16_SCALE)
    else:
        _multiply_in_fp32(half, 1 / _FP16_SCALE, full)
    return full


def _multiply_in_fp32(numbers: Tensor, factor: float, out: Tensor) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(numbers.numpy(), np.float32(factor), out=out.numpy(), dtype=np.float32, casting="same_kind")

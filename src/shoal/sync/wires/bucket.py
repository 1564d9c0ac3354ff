"""What a wire is handed, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.errors import CheckpointError
from shoal.sync.waiting import Release

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


class Wire(Protocol):
    """Made once per run. Called with a bucket it gives a future of `flat` holding the *sum*, the same bits on every
    rank; nobody divides by the world size, because the loss was already divided by the global token count."""

    def __call__(self, bucket: Bucket) -> Future[Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: State) -> None: ...


class Released:
    """A wire whose sums end, at the latest, with the generation."""

    def __init__(self, wire: Wire, release: Release) -> None:
        self._wire = wire
        self._release = release

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._release.guard(self._wire(bucket))

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: State) -> None:
        self._wire.load_state(state)


class Stateless:
    """What a format that forgets everything after a step has to keep: nothing."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: State) -> None:
        check_names({}, state)


class WithWire:
    """What a rank has to remember is in its wire format."""

    _wire: Wire

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

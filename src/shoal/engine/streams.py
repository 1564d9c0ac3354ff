"""Long sequences in segments, and state that follows each of them: truncated backpropagation through time.

    text = shoal.streams((tokens[:-1], tokens[1:]), length=32)
    memory = shoal.Carried(torch.zeros(2, 64), torch.zeros(2, 64), dim=1)     # of one stream; the batch is in dim 1
    session.attach(model, optimizer, memory)
    for step in session:
        with step:
            for inputs, targets, rows in step.batches(text):
                outputs, state = model(inputs, memory.read(rows))
                memory.write(rows, state)
                step.backward(loss_sum(outputs, targets), count=targets.numel())
            step.update()

A sample of the global batch is a stream: position p of the sample order is segment `p // global_batch` of stream
`p % global_batch`. Every rank has the state of all streams, so it does not matter which rank computes a stream next,
and a rank that joins copies them. That costs one all-gather of the states in every step. The new states are applied
with the update: a step that is repeated begins from those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.engine.batches import TensorSource
from shoal.engine.replica import Replica
from shoal.engine.sampling import Shard
from shoal.errors import UsageError
from shoal.sync.gather import gather_rows


class StreamRows(NamedTuple):
    """Which streams the rows of a micro-batch belong to."""

    first: int
    size: int
    streams: int  # Of all ranks.
    is_start: bool  # The streams begin, so their state is the initial one.


class Streams:
    """Tensors along time, cut into as many streams as the global batch has samples: a data source of a session."""

    count: int | None = None
    is_pure = True

    def __init__(self, tensors: tuple[Tensor, ...], length: int) -> None:
        self._tensors = tensors
        self._length = length
        self.fingerprint = TensorSource(tensors).fingerprint

    def fetch(self, shard: Shard, cursor: int) -> Iterator[tuple[Any, ...]]:
        """Yield the next segment of this rank's streams, and which streams they are."""
        plan, length = shard.plan, self._length
        streams, times = plan.global_batch, len(self._tensors[0]) // plan.global_batch
        if times < length:
            raise UsageError(
                f"shoal.streams has {len(self._tensors[0]):,} times for {streams} streams of segments of {length}",
                why=f"every sample of the global batch is a stream, and each would have {times} times",
                fix=f"use a longer sequence, a smaller global_batch, or shoal.streams(…, length={max(1, times)})",
            )
        segment = cursor // streams % (times // length)
        first = plan.offset(shard.rank)
        for size in plan.sizes(shard.rank):
            begins = np.arange(first, first + size) * times + segment * length
            at = torch.from_numpy(begins[:, None] + np.arange(length))
            yield (*(tensor[at] for tensor in self._tensors), StreamRows(first, size, streams, segment == 0))
            first += size

    def close(self) -> None: ...


def streams(tensors: Tensor | Sequence[Tensor], length: int) -> Streams:
    """Cut tensors, whose first dimension is time, into a stream for each sample of the global batch.

    Every step yields the next `length` times of each stream, after the last ones the first again; times at the end that
    fill no segment are left out.
    """
    parts = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if length < 1 or not parts:
        raise UsageError(
            f"shoal.streams got {len(parts)} tensors and length={length}",
            why="a segment has at least one time of at least one tensor",
            fix="for example: shoal.streams((tokens[:-1], tokens[1:]), length=32)",
        )
    return Streams(parts, length)


class Carried:
    """State that a model carries from one segment of a stream to the next, such as that of an LSTM. Attach it.

    `initial` are the tensors of one stream, without the dimension of the batch, which the model has at `dim`.
    """

    def __init__(self, *initial: Tensor, dim: int = 0) -> None:
        self._initial = initial
        self._dim = dim
        self._rows: list[Tensor] = []  # Of all streams, by tensor; none before the first step.
        self._written: list[tuple[int, list[Tensor]]] = []  # In this step, by the first stream.
        self.is_attached = False

    def attach_to(self, device: torch.device) -> None:
        self._initial, self.is_attached = tuple(tensor.to(device) for tensor in self._initial), True

    def read(self, rows: StreamRows) -> Any:
        """Return the state of these streams, without a gradient: a tensor, or a tuple of them."""
        if not self.is_attached:
            raise UsageError(
                "shoal.Carried is not attached to the session",
                why="its state goes with the updates: to other ranks, into checkpoints, and back with a lost step",
                fix="session.attach(model, optimizer, memory)",
            )
        if self._rows and len(self._rows[0]) != rows.streams:
            raise UsageError(
                f"the carried state is of {len(self._rows[0])} streams, and the global batch has {rows.streams}",
                why="the run was begun with another global batch, which cut the sequence at other places",
                fix=f"resume it with global_batch={len(self._rows[0])}",
            )
        if rows.is_start or not self._rows:
            parts = [tensor.expand(rows.size, *tensor.shape) for tensor in self._initial]
        else:
            parts = [tensor[rows.first : rows.first + rows.size] for tensor in self._rows]
        state = tuple(part.movedim(0, self._dim).contiguous() for part in parts)
        return state if len(state) > 1 else state[0]

    def write(self, rows: StreamRows, state: Tensor | Sequence[Tensor]) -> None:
        """Keep the state after this segment, for the next one."""
        parts = [state] if isinstance(state, Tensor) else list(state)
        new = [part.detach().movedim(self._dim, 0) for part in parts]
        wanted = [(rows.size, *tensor.shape) for tensor in self._initial]
        if [tuple(part.shape) for part in new] != wanted:
            raise UsageError(
                f"memory.write got {_shapes(part.shape for part in parts)} for {rows.size} streams",
                why=f"one stream has {_shapes(tensor.shape for tensor in self._initial)}, and the batch is dimension "
                f"{self._dim}",
                fix="pass the state as the model returns it, and make shoal.Carried(…, dim=…) with its initial shapes",
            )
        self._written.append((rows.first, new))

    def begin_step(self) -> None:
        self._written.clear()

    def gather(self, replica: Replica) -> list[Tensor]:
        """Return the new states of all streams. All ranks call it."""
        written = sorted(self._written, key=lambda item: item[0])
        count = sum(len(parts[0]) for _, parts in written)
        if count != replica.share:
            raise UsageError(
                f"the carried state of {count} streams was written, and this rank has {replica.share} in this step",
                why="each stream's next segment begins from the state after this one",
                fix="call memory.write(rows, state) once for every batch of step.batches(…)",
            )
        columns = [torch.cat([parts[number] for _, parts in written]) for number in range(len(self._initial))]
        return [gather_rows(replica.world, column, replica.plan.shares).rows for column in columns]

    def set(self, rows: list[Tensor]) -> None:
        self._rows = rows

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The saved tensors may be the only copy of the state before the first step.
        pairs = zip(state["rows"], self._initial, strict=False)
        self._rows = [rows.to(initial.device, copy=True) for rows, initial in pairs]


def _shapes(shapes: Any) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


def carried_of(replica: Replica) -> list[Carried]:
    return [other for other in replica.state.others if isinstance(other, Carried)]


def with_carried(replica: Replica, after: Callable[[], object] | None) -> Callable[[], object] | None:
    """Exchange the carried states, before the update; return what puts them in place with it, and `after`."""
    gathered = [(carried, carried.gather(replica)) for carried in carried_of(replica)]
    if not gathered:
        return after

    def apply() -> None:
        for carried, rows in gathered:
            carried.set(rows)
        if after is not None:
            after()

    return apply

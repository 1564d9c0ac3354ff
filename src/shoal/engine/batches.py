"""This rank's part of every global batch, from any kind of dataset, in micro-batches.

The order of samples is `engine.sampling`'s: a pure function of seed and position. So every sample of an epoch is used
exactly once, whatever ranks come and go, and a step that is repeated gets the same samples.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from shoal.engine.sampling import Draw, Indices, Shard
from shoal.errors import DataError, UsageError
from shoal.sync.replicas import flat_bytes

# A step that is repeated asks a stream for samples of at most this many global batches ago.
_KEPT_BATCHES = 2


@runtime_checkable
class Source(Protocol):
    """A dataset as the engine sees it."""

    count: int | None  # Samples of an epoch; None for a stream.
    # Reading draws no random numbers and moves no state, so a batch may be read before its step begins.
    is_pure: bool

    def fetch(self, shard: Shard, cursor: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of the global batch that begins at `cursor`."""

    def fingerprint(self) -> int:
        """Return a number that differs where ranks have different data."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """A dataset whose samples are drawn with replacement."""

    data: Any
    draw: Draw


def with_replacement(data: Any) -> Drawn:
    """Draw the samples of a dataset with replacement, all with the same probability."""
    return Drawn(data, Draw())


def weighted(data: Any, weights: Any) -> Drawn:
    """Draw the samples of a dataset with replacement, each with a probability in proportion to its weight."""
    numbers = np.asarray(weights, dtype=np.float64)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or (numbers < 0).any() or not numbers.any():
        raise UsageError(
            "shoal.weighted got weights that are not one number for each sample",
            why="a weight is finite and not below zero, and at least one is above it",
            fix="pass for example: shoal.weighted(dataset, [1.0] * len(dataset))",
        )
    source = open_source(data)
    if source.count not in (None, len(numbers)):
        raise UsageError(
            f"shoal.weighted got {len(numbers):,} weights for {source.count:,} samples",
            why="weight i is that of sample i of the dataset",
            fix="pass one weight for each sample, in their order",
        )
    return Drawn(data, Draw(numbers))


def open_source(data: Any) -> TensorSource | MapSource | StreamSource:
    """Return the source for a dataset, a sequence, a tensor, a tuple of tensors, a `DataLoader` or a stream."""
    if isinstance(data, Drawn):
        source = open_source(data.data)
        if isinstance(source, StreamSource):
            raise UsageError(
                f"samples of a {type(data.data).__qualname__} cannot be drawn with replacement",
                why="it is read from its beginning to its end, and has no sample with a number",
                fix="use a dataset with __len__ and __getitem__",
            )
        source.draw = data.draw
        return source
    if isinstance(data, DataLoader):
        return _open_loader(data)
    if isinstance(data, Tensor | np.ndarray):
        return TensorSource((torch.as_tensor(data),), is_single=True)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return TensorSource(tuple(torch.as_tensor(part) for part in data))
    if isinstance(data, IterableDataset):
        return StreamSource(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapSource(data)
    if isinstance(data, Iterable) and not isinstance(data, Iterator):
        return StreamSource(data)
    raise UsageError(
        f"a {type(data).__qualname__} is no dataset that can be shared by ranks",
        why="a step that is done again must be able to read its samples again"
        if isinstance(data, Iterator)
        else "it has neither a length with items nor an iterator",
        fix="pass a dataset with __len__ and __getitem__, a tensor, a tuple of tensors, a DataLoader or an iterable",
    )


def _open_loader(loader: DataLoader[Any]) -> MapSource | StreamSource:
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:
            raise UsageError(
                "a DataLoader over an IterableDataset has workers",
                why="every worker would read the whole stream, and samples would be used several times",
                fix="use num_workers=0, or a dataset with __len__ and __getitem__",
            )
        return StreamSource(loader.dataset, loader.collate_fn)
    # A program's own batch sampler leaves the loader without a batch size, and so does the end of batching.
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UsageError(
            "the DataLoader has batch_size=None: each item of its dataset is a batch already",
            why="shoal makes the batches itself, of samples that it divides over the ranks",
            fix="give it a dataset of single samples",
        )
    own = loader.batch_sampler if loader.batch_size is None else loader.sampler
    is_partial = isinstance(own, RandomSampler) and (own.replacement or own.num_samples != len(own.data_source))
    if type(own) not in (RandomSampler, SequentialSampler) or is_partial:
        raise _own_sampler(own)
    return MapSource(loader.dataset, loader.collate_fn, loader)


def _own_sampler(own: Any) -> UsageError:
    """Return the refusal of a program's own sampler, with what to write in its place."""
    fixes: dict[str, str] = {
        "WeightedRandomSampler": "step.batches(shoal.weighted(dataset, weights)), which draws with replacement",
        "SubsetRandomSampler": "step.batches(torch.utils.data.Subset(dataset, indices))",
        "DistributedSampler": "step.batches(dataset): shoal divides it over the ranks itself",
        "RandomSampler": "step.batches(shoal.with_replacement(dataset)), or the dataset alone for each sample once in "
        "an epoch",
        "BatchSampler": "step.batches(dataset), with Session(micro_batch=…) for the size of batches",
    }
    fallback = (
        "step.batches(dataset); an order of your own is an order of the dataset's items, a choice of them is "
        "torch.utils.data.Subset, weights are shoal.weighted(dataset, weights)"
    )
    kind = next((kind.__name__ for kind in type(own).__mro__ if kind.__name__ in fixes), "")
    how = " with num_samples or replacement=True" if type(own) is RandomSampler else ""
    return UsageError(
        f"the DataLoader has a sampler of its own, {type(own).__qualname__}{how}",
        why="shoal chooses the samples, by seed and position alone: so each position is used exactly once, also when "
        "ranks come and go",
        fix=f"leave the sampler out and write {fixes.get(kind, fallback)}",
    )


@dataclass
class TensorSource:
    """Tensors with one row for every sample."""

    tensors: tuple[Tensor, ...]
    is_single: bool = False
    is_pure: bool = True
    draw: Draw | None = None

    def __post_init__(self) -> None:
        lengths = {len(tensor) for tensor in self.tensors}
        if len(lengths) != 1:
            raise DataError(
                f"the tensors have {', '.join(str(len(tensor)) for tensor in self.tensors)} rows",
                why="row i of each of them belongs to sample i",
                fix="make them equally long",
            )
        [self.count] = lengths

    count: int | None = None

    def fetch(self, shard: Shard, cursor: int) -> Iterator[Any]:
        return self.read(micro_batch_indices(shard, cursor))

    def read(self, batches: Iterable[Indices]) -> Iterator[Any]:
        """Yield batches of these samples."""
        for indices in batches:
            rows = torch.from_numpy(indices)
            parts = tuple(tensor[rows] for tensor in self.tensors)
            yield parts[0] if self.is_single else parts

    def fingerprint(self) -> int:
        draw = 0 if self.draw is None else self.draw.checksum
        rows = [len(self.tensors[0]) // 2, -1] if len(self.tensors[0]) else []
        return _checksum([self.count, draw, [tensor[row] for tensor in self.tensors for row in rows]])

    def close(self) -> None: ...


class MapSource:
    """A dataset with a length and items; with a `DataLoader` its collate function, workers and pinned memory."""

    is_pure = False

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self.count: int | None = len(dataset)
        self.draw: Draw | None = None
        self._dataset = dataset
        self._collate = collate or default_collate
        self._loader = loader if loader is not None and (loader.num_workers or loader.pin_memory) else None
        self._ahead: _Prefetched | None = None

    def fetch(self, shard: Shard, cursor: int) -> Iterator[Any]:
        if self._loader is None:
            yield from self.read(micro_batch_indices(shard, cursor))
            return
        if self._ahead is None or not self._ahead.continues(shard, cursor):
            self.close()
            self._ahead = _Prefetched(self._loader, shard, cursor)
        yield from self._ahead.next_step()

    def read(self, batches: Iterable[Indices]) -> Iterator[Any]:
        """Yield batches of these samples, read by workers of their own where the `DataLoader` has some."""
        if self._loader is not None:
            yield from _loader_over(self._loader, [indices.tolist() for indices in batches])
            return
        for indices in batches:
            yield self._collate(read_items(self._dataset, indices))

    def fingerprint(self) -> int:
        """Compare the first sample too, unless it is random: then two reads differ."""
        first = [_checksum(read_items(self._dataset, np.array([0]))) for _ in range(2)] if self.count else [0]
        draw = 0 if self.draw is None else self.draw.checksum
        return _checksum([self.count, draw, first[0] if len(set(first)) == 1 else 0])

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class StreamSource:
    """An iterable without random access: every rank reads all of it and keeps its own part.

    It must yield the same samples in the same order on every rank and in every epoch. When it ends, it starts again.
    A resumed training reads it from the beginning up to its position.
    """

    count: int | None = None
    is_pure = False

    def __init__(self, stream: Iterable[Any], collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._stream = stream
        self._collate = collate or default_collate
        self._items: Iterator[Any] = iter(())
        self._position = 0  # Of the next item.
        self._kept: deque[Any] = deque()  # The items before it.
        self._is_open = False

    def fetch(self, shard: Shard, cursor: int) -> Iterator[Any]:
        first, end = shard.positions(cursor)
        if cursor < self._position - len(self._kept):
            self.close()
        kept_from = _KEPT_BATCHES * shard.plan.global_batch
        while self._position < end:
            self._kept.append(self._read())
            self._position += 1
            while len(self._kept) > kept_from:
                self._kept.popleft()
        begin = self._position - len(self._kept)
        items = (self._kept[position - begin] for position in range(first, end))
        for size in shard.plan.sizes(shard.rank):
            yield self._collate(list(islice(items, size)))

    def read_once(self, size: int) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Yield, from the beginning to the end, the number of samples of each batch, and what makes the batch."""
        items = iter(self._stream)
        while chunk := list(islice(items, size)):
            yield len(chunk), partial(self._collate, chunk)

    def fingerprint(self) -> int:
        return zlib.crc32(type(self._stream).__qualname__.encode())

    def close(self) -> None:
        self._items, self._position, self._is_open = iter(()), 0, False
        self._kept.clear()

    def _read(self) -> Any:
        for _ in range(2):
            try:
                return next(self._items)
            except StopIteration:
                self._items = iter(self._stream)
        raise DataError(
            f"the stream {type(self._stream).__name__} has no samples",
            why="its iterator ended at once, at the beginning or when it was started again for another epoch",
            fix="let __iter__ return a new iterator over all samples each time",
        )


class _Prefetched:
    """The micro-batches of the coming steps, read ahead by the workers of a `DataLoader`."""

    def __init__(self, loader: DataLoader[Any], shard: Shard, cursor: int) -> None:
        self._shard = shard
        self._cursor = cursor
        self._items = iter(_loader_over(loader, _CursorSampler(shard, cursor)))

    def continues(self, shard: Shard, cursor: int) -> bool:
        return shard == self._shard and cursor == self._cursor

    def next_step(self) -> Iterator[Any]:
        for _ in range(self._shard.plan.counts[self._shard.rank]):
            yield next(self._items)
        # Only a step that was read to its end can be continued from.
        self._cursor += self._shard.plan.global_batch

    def close(self) -> None:
        if (shutdown := getattr(self._items, "_shutdown_workers", None)) is not None:
            shutdown()


def _loader_over(loader: DataLoader[Any], batches: Iterable[list[int]]) -> DataLoader[Any]:
    """Return a loader like this one over batches of these samples."""
    options: dict[str, Any] = {"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context}
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "worker_init_fn": loader.worker_init_fn}
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        **options,
    )


@dataclass(frozen=True)
class _CursorSampler:
    """The indices of this rank's micro-batches from `cursor` on, without end."""

    shard: Shard
    cursor: int

    def __iter__(self) -> Iterator[list[int]]:
        cursor = self.cursor
        while True:
            for indices in micro_batch_indices(self.shard, cursor):
                yield indices.tolist()
            cursor += self.shard.plan.global_batch


def micro_batch_indices(shard: Shard, cursor: int) -> Iterator[Indices]:
    indices, start = shard.indices(cursor), 0
    for size in shard.plan.sizes(shard.rank):
        yield indices[start : start + size]
        start += size


def read_items(dataset: Any, indices: Indices) -> list[Any]:
    """Read samples, all at once where the dataset can."""
    if hasattr(dataset, "__getitems__"):
        items: list[Any] = dataset.__getitems__(indices.tolist())
        return items
    return [dataset[int(index)] for index in indices]


class BatchAhead(NamedTuple):
    """The first micro-batch of the next step, read while the GPU computed this one."""

    source: Source
    shard: Shard
    cursor: int
    batch: Any
    rest: Iterator[Any]

    def serves(self, source: Source, shard: Shard, cursor: int) -> bool:
        return self.source is source and (self.shard, self.cursor) == (shard, cursor)


def read_ahead(source: Source, shard: Shard, cursor: int, device: torch.device) -> BatchAhead | None:
    """Read the first micro-batch at `cursor`, if the device computes meanwhile and nothing depends on the moment."""
    if device.type != "cuda" or not source.is_pure:
        return None
    items = source.fetch(shard, cursor)
    return BatchAhead(source, shard, cursor, move(next(items), device), items)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device."""
    match batch:
        case Tensor():
            if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_pinned():
                # From other memory the copy would not start before the GPU has done all that is queued.
                batch = batch.pin_memory()
            return batch.to(device, non_blocking=True)
        case Mapping():
            return {key: move(value, device) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(move(value, device) for value in batch))
        case tuple() | list():
            return type(batch)(move(value, device) for value in batch)
        case _:
            return batch.to(device) if hasattr(batch, "to") else batch


def _checksum(value: Any, start: int = 0) -> int:
    """Return a checksum of nested tensors, numbers and texts."""
    match value:
        case Tensor():
            start = zlib.crc32(f"{tuple(value.shape)}{value.dtype}".encode(), start)
            return zlib.crc32(flat_bytes(value), start)
        case np.ndarray():
            return _checksum(torch.from_numpy(np.ascontiguousarray(value)), start)
        case Mapping():
            return _checksum([item for pair in value.items() for item in pair], start)
        case str() | bytes() | int() | float() | None:
            return zlib.crc32(repr(value).encode(), start)
        case Sequence():
            for item in value:
                start = _checksum(item, start)
            return zlib.crc32(str(len(value)).encode(), start)
        case _:
            return zlib.crc32(type(value).__qualname__.encode(), start)

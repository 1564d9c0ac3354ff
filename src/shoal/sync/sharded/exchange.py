"""The two halves of a sharded exchange: every rank sums its part of a bucket, and sends its part of the weights to all.

Both travel in the wire format of the run. In a lossy one gradients are rounded before they are sent, as in DDP, and
owners send how far their weights are from those that all ranks have in common: what rounding leaves out of one step is
in the next one, so that nothing is lost over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shoal.config.sync_choice import BLOCK_NUMBERS, parse_wire
from shoal.cost.model_size import blocks_of
from shoal.sync.compression.base import from_half, to_half
from shoal.sync.compression.codecs import bf16_codec, int8_codec
from shoal.sync.compression.native import load_kernels
from shoal.sync.compression.reduce_scatter import Codec
from shoal.sync.sharded.layout import BucketLayout, Range, ShardLayout
from shoal.sync.sharded.pipeline import CHUNK_BYTES, Chunk, ChunkPipeline
from shoal.sync.world import World

_NONE = torch.empty(0)


class Halves:
    """fp16 for gradients, scaled as in DDP."""

    record_bytes = 2 * BLOCK_NUMBERS
    keeps_residual = False

    def encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        to_half(gradient, _as_halves(records, gradient.numel()))

    def reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        scratch = torch.empty_like(gradient)
        for other in others:
            gradient.add_(from_half(_as_halves(other, gradient.numel()), scratch))
        self.encode(gradient, residual, records)

    def decode(self, records: Tensor, gradient: Tensor) -> None:
        from_half(_as_halves(records, gradient.numel()), gradient)


def _as_halves(records: Tensor, count: int) -> Tensor:
    return records.view(-1).view(torch.float16)[:count]


@dataclass(frozen=True)
class Codecs:
    """How gradients and weights are encoded; None where they travel as they are."""

    gradients: Codec | None = None
    weights: Codec | None = None

    @property
    def is_lossy(self) -> bool:
        return self.weights is not None


def make_codecs(wire: str, level: int) -> Codecs:
    """Return the codecs of a wire format.

    With fp16 weights travel in bf16: updates of small rates are below what fp16 can express. With ZeRO-3 weights travel
    as they are: no rank has those of the step before, to which an update could be added.
    """
    codecs = _make_codecs(wire)
    return replace(codecs, weights=None) if level == 3 else codecs


def _make_codecs(wire: str) -> Codecs:
    name, kernels = parse_wire(wire).name, load_kernels()
    match name:
        case "fp16":
            return Codecs(Halves(), bf16_codec(kernels))
        case "bf16":
            return Codecs(bf16_codec(kernels), bf16_codec(kernels))
        case "int8":
            return Codecs(int8_codec(kernels), int8_codec(kernels))
    return Codecs()


class Spread:
    """A bucket whose elements lie in several tensors: those of its parameters, one after the other."""

    def __init__(self, layout: BucketLayout, tensors: Sequence[Tensor]) -> None:
        self._layout = layout
        self._tensors = dict(zip(layout.parameters, tensors, strict=True))  # One-dimensional.

    def views(self, begin: int, end: int) -> Iterator[Tensor]:
        for piece in self._layout.pieces(begin, end):
            yield self._tensors[piece.parameter][piece.of_parameter]

    def read(self, begin: int, end: int, out: Tensor) -> Tensor:
        for view, part in zip(views := list(self.views(begin, end)), _split_as(out, views), strict=True):
            part.copy_(view)
        return out

    def write(self, begin: int, end: int, numbers: Tensor) -> None:
        for view, part in zip(views := list(self.views(begin, end)), _split_as(numbers, views), strict=True):
            view.copy_(part)

    def add(self, begin: int, end: int, numbers: Tensor) -> None:
        for view, part in zip(views := list(self.views(begin, end)), _split_as(numbers, views), strict=True):
            view.add_(part.to(view.device))


def _split_as(flat: Tensor, views: Sequence[Tensor]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = flat.split([len(view) for view in views])
    return parts


class PartNumbers(Protocol):
    """The numbers of a bucket, in one tensor or in several."""

    def read(self, begin: int, end: int, out: Tensor) -> Tensor: ...
    def write(self, begin: int, end: int, numbers: Tensor) -> None: ...


class Part:
    """One part of a bucket in a tensor of its own, addressed by the bucket's places."""

    def __init__(self, begin: int, numbers: Tensor) -> None:
        self.begin = begin
        self.numbers = numbers

    def view(self, begin: int, end: int) -> Tensor:
        return self.numbers[begin - self.begin : end - self.begin]

    def read(self, begin: int, end: int, out: Tensor) -> Tensor:
        return out.copy_(self.view(begin, end))

    def write(self, begin: int, end: int, numbers: Tensor) -> None:
        self.view(begin, end).copy_(numbers)


class ExactPart(Part):
    """The exact weights of a part, where those that all ranks have are rounded.

    Between two steps it has only what rounding has left out of them: a program may change the weights that it sees, for
    example clamp them, and its change must stay.
    """

    def __init__(self, begin: int, numbers: Tensor) -> None:
        """Begin without any difference: `numbers` are zeros."""
        super().__init__(begin, numbers)
        self._is_rest = True

    def make_whole(self, weights: Spread) -> None:
        if self._is_rest:
            self.numbers.add_(weights.read(self.begin, self._end, torch.empty_like(self.numbers)))
            self._is_rest = False

    def keep_rest(self, weights: Spread) -> None:
        if not self._is_rest:
            self.numbers.sub_(weights.read(self.begin, self._end, torch.empty_like(self.numbers)))
            self._is_rest = True

    def drop_rest(self) -> None:
        """Take the weights that all ranks have for the exact ones."""
        self.numbers.zero_()
        self._is_rest = True

    @property
    def _end(self) -> int:
        return self.begin + len(self.numbers)


class PartExchange:
    """The exchanges of all buckets, in the order in which they are called: the same on all ranks."""

    def __init__(
        self, world: World, layout: ShardLayout, codecs: Codecs, are_alike: bool, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._world = world
        self._layout = layout
        self._dtypes = dtypes  # By bucket.
        self._codecs = codecs
        # Ranks that compute alike make the same update of a copy: it needs not be sent to them.
        self._is_copy_sent = self._codecs.is_lossy or not are_alike
        self._pipeline = ChunkPipeline(world)
        self._residuals = [torch.empty(0)] * len(layout.buckets)
        if self._codecs.gradients is not None and self._codecs.gradients.keeps_residual:
            self._residuals = [torch.zeros(bucket.elements) for bucket in layout.buckets]

    @property
    def is_lossy(self) -> bool:
        return self._codecs.is_lossy

    @property
    def residuals(self) -> list[Tensor]:
        """What rounding has left out of the gradients of earlier steps, by bucket; empty for most formats."""
        return self._residuals

    def close(self) -> None:
        self._pipeline.close()

    # Gradients.

    def reduce_scatter(
        self, bucket: int, gradients: Part, sums: Part | None, copy: Part | None, is_last: bool
    ) -> Future[float]:
        """Sum this rank's part over all ranks, in place or added to `sums`. `gradients` is the whole bucket.

        The sum of the part of which this rank keeps a copy goes to `copy`: all ranks give one, or none does. It may be
        the bucket itself: what was there has been sent by then.
        """
        codec = self._codec_of(bucket, self._codecs.gradients)
        return self._pipeline.put(self._scatter(bucket, gradients, sums, copy, codec), is_last)

    def _scatter(
        self, bucket: int, gradients: Part, sums: Part | None, copy: Part | None, codec: Codec | None
    ) -> Iterator[Chunk]:
        rank = self._world.rank
        for spans in self._chunks(bucket, codec):
            own = spans[rank]

            def fill(parts: Sequence[Tensor], spans: Sequence[Range] = spans) -> None:
                for part, span in zip(parts, spans, strict=True):
                    if len(part):
                        self._encode(bucket, gradients.view(*span), span, part, codec)

            def take(parts: Sequence[Tensor], own: Range = own, spans: Sequence[Range] = spans) -> Chunk | None:
                total = gradients.view(*own)
                for part in parts:
                    if len(part):
                        total.add_(self._decode(part, total, codec))
                if sums is not None:
                    total = sums.view(*own).add_(total)
                return None if copy is None else self._forward(bucket, total, copy, spans, codec)

            sent = [self._bytes_of(bucket, span, codec) for span in spans]
            received = [self._bytes_of(bucket, own, codec)] * len(spans)
            yield Chunk(_except(rank, sent), _except(rank, received), fill, take)

    def _forward(self, bucket: int, total: Tensor, copy: Part, spans: Sequence[Range], codec: Codec | None) -> Chunk:
        """Send the sum of this rank's part to the rank that keeps a copy of it."""
        rank, ranks = self._world.rank, self._layout.ranks
        holder, source = (rank + self._layout.copy_shift) % ranks, (rank - self._layout.copy_shift) % ranks

        def fill(parts: Sequence[Tensor]) -> None:
            if len(parts[holder]):
                self._encode(bucket, total, spans[rank], parts[holder], codec)
                if codec is not None:
                    # Owner and copy make the same update, of the same numbers.
                    total.copy_(self._decode(parts[holder], total, codec))

        def take(parts: Sequence[Tensor]) -> None:
            if len(parts[source]):
                target = copy.view(*spans[source])
                target.copy_(self._decode(parts[source], target, codec))

        sent, received = [0] * ranks, [0] * ranks
        sent[holder] = self._bytes_of(bucket, spans[rank], codec)
        received[source] = self._bytes_of(bucket, spans[source], codec)
        return Chunk(sent, received, fill, take)

    # Weights.

    def gather(
        self, bucket: int, own: PartNumbers, weights: Spread, is_last: bool, exact: Sequence[ExactPart] = ()
    ) -> Future[float]:
        """Give all ranks the parts of all others: `own` has this rank's part, `weights` gets them all.

        In a lossy format `own` has exact weights, and the same rounded ones come to `weights` on all ranks. Of the
        parts in `exact` only what rounding has left out is kept then.
        """

        def conclude() -> None:
            for part in exact:
                part.keep_rest(weights)

        codec = self._codec_of(bucket, self._codecs.weights)
        chunks = (
            self._gather(bucket, own, weights) if codec is None else self._gather_lossy(bucket, own, weights, codec)
        )
        return self._pipeline.put(chunks, is_last, conclude)

    def gather_exact(self, bucket: int, own: PartNumbers, target: PartNumbers, dtype: torch.dtype) -> Future[float]:
        """Give all ranks the exact parts of all others, whatever the wire format is."""
        return self._pipeline.put(self._gather(bucket, own, target, dtype, is_complete=True), is_last=True)

    def _gather(
        self,
        bucket: int,
        own: PartNumbers,
        target: PartNumbers,
        dtype: torch.dtype | None = None,
        is_complete: bool = False,
    ) -> Iterator[Chunk]:
        rank, dtype = self._world.rank, dtype or self._dtypes[bucket]
        holders, kept = self._spared() if not is_complete else ((), ())
        for spans in self._chunks(bucket, None, dtype.itemsize):

            def fill(parts: Sequence[Tensor], span: Range = spans[rank]) -> None:
                filled: Tensor | None = None
                for part in parts:
                    if len(part) and filled is None:
                        own.read(*span, part.view(dtype))
                        filled = part
                    elif len(part) and filled is not None:
                        part.copy_(filled)

            def take(parts: Sequence[Tensor], spans: Sequence[Range] = spans) -> None:
                for part, span in zip(parts, spans, strict=True):
                    if len(part):
                        target.write(*span, part.view(dtype))

            own_bytes = dtype.itemsize * (spans[rank][1] - spans[rank][0])
            sent = [0 if other in holders else own_bytes for other in range(len(spans))]
            received = [
                0 if other in kept else dtype.itemsize * (end - begin) for other, (begin, end) in enumerate(spans)
            ]
            yield Chunk(_except(rank, sent), _except(rank, received), fill, take)

    def _gather_lossy(self, bucket: int, own: PartNumbers, weights: Spread, codec: Codec) -> Iterator[Chunk]:
        """Send how far the exact weights are from the common ones, and move the common ones by what was sent."""
        rank = self._world.rank
        for spans in self._chunks(bucket, codec):

            def fill(parts: Sequence[Tensor], span: Range = spans[rank]) -> None:
                count = span[1] - span[0]
                exact, common = own.read(*span, torch.empty(count)), weights.read(*span, torch.empty(count))
                change = exact.sub_(common)
                record = torch.empty(blocks_of(count) * codec.record_bytes, dtype=torch.uint8)
                if count:
                    codec.encode(
                        change, torch.zeros_like(change) if codec.keeps_residual else _NONE, _records(record, codec)
                    )
                    codec.decode(_records(record, codec), change)
                    weights.add(*span, change)
                for part in parts:
                    if len(part):
                        part.copy_(record)

            def take(parts: Sequence[Tensor], spans: Sequence[Range] = spans) -> None:
                for part, (begin, end) in zip(parts, spans, strict=True):
                    if len(part):
                        change = torch.empty(end - begin)
                        codec.decode(_records(part, codec), change)
                        weights.add(begin, end, change)

            sizes = [self._bytes_of(bucket, span, codec) for span in spans]
            yield Chunk(_except(rank, [sizes[rank]] * len(spans)), _except(rank, sizes), fill, take)

    def _spared(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that compute this rank's part themselves, and those whose part this rank computes."""
        if self._is_copy_sent:
            return (), ()
        rank = self._world.rank
        return self._layout.holders(rank)[1:], self._layout.held_by(rank)[1:]

    # Chunks.

    def _chunks(self, bucket: int, codec: Codec | None, itemsize: int | None = None) -> Iterator[list[Range]]:
        """Yield for each exchange the range of every rank's part that it carries."""
        layout = self._layout.buckets[bucket]
        if codec is None:
            count = CHUNK_BYTES // (itemsize or self._dtypes[bucket].itemsize)
        else:
            count = CHUNK_BYTES // codec.record_bytes * BLOCK_NUMBERS
        longest = max(end - begin for begin, end in map(layout.part, range(self._layout.ranks)))
        for done in range(0, longest, count):
            parts = map(layout.part, range(self._layout.ranks))
            yield [(min(begin + done, end), min(begin + done + count, end)) for begin, end in parts]

    def _codec_of(self, bucket: int, codec: Codec | None) -> Codec | None:
        return codec if self._dtypes[bucket] == torch.float32 else None

    def _bytes_of(self, bucket: int, span: Range, codec: Codec | None) -> int:
        count = span[1] - span[0]
        return count * self._dtypes[bucket].itemsize if codec is None else blocks_of(count) * codec.record_bytes

    def _encode(self, bucket: int, numbers: Tensor, span: Range, part: Tensor, codec: Codec | None) -> None:
        if codec is None:
            part.view(numbers.dtype).copy_(numbers)
        else:
            residual = self._residuals[bucket][slice(*span)] if codec.keeps_residual else _NONE
            codec.encode(numbers.cpu(), residual, _records(part, codec))

    def _decode(self, part: Tensor, like: Tensor, codec: Codec | None) -> Tensor:
        if codec is None:
            return part.view(like.dtype).to(like.device)
        decoded = torch.empty(len(like))
        codec.decode(_records(part, codec), decoded)
        return decoded.to(like.device)


def _records(part: Tensor, codec: Codec) -> Tensor:
    return part.view(torch.int8).view(-1, codec.record_bytes)


def _except(rank: int, counts: list[int]) -> list[int]:
    """Return the counts without what a rank would send to itself."""
    return [0 if other == rank else count for other, count in enumerate(counts)]

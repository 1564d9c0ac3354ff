"""DDP's buckets: which gradients are exchanged together, and when in backward they are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.schema import ModelConfig

# DDP's own defaults: the first bucket is small, so that there is something to send early.
STOCK_FIRST_MB, STOCK_MB = 1.0, 25.0
_GRADIENT_BYTES = 4
# DDP's 25 MB are one bucket for a small model, which hides nothing. Measured on two nodes with 6.7 MB of gradients:
# buckets of 1 MB make a step 8% shorter at 1 Gbit and 13% at 100 Mbit; smaller ones lose more to messages than they
# hide.
_BUCKETS = 8
_LEAST_MB, _MOST_MB = 1.0, 25.0
# With more rows of all ranks together than this fraction of the weight, two parts are no fewer bytes than one.
_FEW_ROWS = 0.25
# A row is sent with its index, which is as long as two gradients.
_ROW_INDEX_NUMBERS = 2
# Assumed for a model of which only the number of parameters is known.
_UNKNOWN_TENSORS = 100


@dataclass(frozen=True)
class GradientTensor:
    parameters: int
    ready: float  # fraction of backward's time after which it is complete


@dataclass(frozen=True)
class BucketCost:
    parameters: int
    ready: float  # fraction of backward's time after which it is complete


def gradients(model: ModelConfig) -> list[GradientTensor]:
    """Return the tensors of shoal's GPT in the order in which backward completes them.

    The tied embedding is last, although the head, its dense part, was first: the look-up at the input adds to it.
    `split_tied` models the exchange that sends the two parts separately.
    """
    tensors = _block_tensors(model)
    head_work = float(model.vocab_size * model.width)
    total_work = head_work + model.layers * sum(work for _, work in tensors)
    done = head_work
    ordered = [GradientTensor(size, done / total_work) for size in (model.width, model.width)]
    for size, work in tensors * model.layers:
        done += work
        ordered.append(GradientTensor(size, done / total_work))
    ordered += [GradientTensor(model.seq_len * model.width, 1.0), GradientTensor(model.vocab_size * model.width, 1.0)]
    return ordered


def _block_tensors(model: ModelConfig) -> list[tuple[int, float]]:
    """Return parameters and relative work of a block's tensors, the last layer first: bias and weight of each product,
    then the norm before it."""
    width = model.width
    attention = model.seq_len * width
    return [
        (width, 0.0),
        (4 * width**2, 4.0 * width**2),
        (4 * width, 0.0),
        (4 * width**2, 4.0 * width**2),
        (2 * width, 0.0),
        (width, 0.0),
        (width**2, 1.0 * width**2),
        (3 * width, 0.0),
        (3 * width**2, 3.0 * width**2 + attention),
        (2 * width, 0.0),
    ]


def even_gradients(parameters: int) -> list[GradientTensor]:
    """Return equal tensors, for a model of which only the size is known."""
    count = min(_UNKNOWN_TENSORS, parameters)
    ends = [round(parameters * (index + 1) / count) for index in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [GradientTensor(size, (index + 1) / count) for index, size in enumerate(sizes)]


def bucket_mb_for(gradient_bytes: float) -> float:
    """Return an eighth of the gradients, within limits."""
    return min(_MOST_MB, max(_LEAST_MB, gradient_bytes / _BUCKETS / 2**20))


def fill_buckets(
    tensors: Sequence[GradientTensor],
    bucket_mb: float,
    first_mb: float | None = None,
    gradient_bytes: int = _GRADIENT_BYTES,
) -> list[BucketCost]:
    """Fill buckets as DDP does once it has seen a backward: in order of readiness; the tensor that reaches the limit
    closes its bucket. `first_mb` is the limit of the first one."""
    limit_bytes = int(bucket_mb * 2**20)
    limit, filled = min(int((first_mb or bucket_mb) * 2**20), limit_bytes), 0
    buckets = []
    for tensor in tensors:
        filled += tensor.parameters
        if gradient_bytes * filled >= limit:
            buckets.append(BucketCost(filled, tensor.ready))
            limit, filled = limit_bytes, 0
    return [*buckets, BucketCost(filled, tensors[-1].ready)] if filled else buckets


def touches_few_rows(vocab_size: int, tokens: int, world_size: int) -> bool:
    """Return whether `tokens` of each rank's micro-batch leave most rows of the embedding unchanged, so that sending
    them separately from the head's part pays (`sync/gradients.py`)."""
    return world_size > 1 and tokens * world_size < _FEW_ROWS * vocab_size


def split_tied(model: ModelConfig, tokens: int, world_size: int, bucket_mb: float) -> list[BucketCost]:
    """Put the head's part before all other gradients, and the rows of all ranks' tokens behind them. The rows are
    gathered, not summed: half the bytes that as many gradients would take."""
    others = gradients(model)[:-1]
    rows = tokens * world_size * (model.width + _ROW_INDEX_NUMBERS) // 2
    return [BucketCost(model.vocab_size * model.width, 0.0), *fill_buckets(others, bucket_mb), BucketCost(rows, 1.0)]

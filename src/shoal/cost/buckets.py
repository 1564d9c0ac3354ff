"""Which gradients travel together, and when in backward they are ready: DDP's buckets, by counting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.config.sync_choice import DEFAULT_RANK, WireName, parse_wire

# DDP's own defaults: the first bucket is small, so that something to send is there early.
STOCK_FIRST_MB, STOCK_MB = 1.0, 25.0
_GRADIENT_BYTES = 4
# DDP's 25 MB are one bucket for a small model, and nothing of it is hidden. Measured on two nodes with 6.7 MB of
# gradients: buckets of 1 MB make a step 8% shorter at 1 Gbit and 13% at 100 Mbit; smaller ones pay more for messages
# than they hide.
_PARTS = 8
_LEAST_MB, _MOST_MB = 1.0, 25.0
# Rows of all ranks together, as a part of the weight's: with more of them two parts are no less than one.
_FEW_ROWS = 0.25
# A row travels with its number, as long as two gradients.
_ROW_NUMBER = 2
# Tensors for which nobody knows the shape, only how many parameters there are in all.
_UNKNOWN_TENSORS = 100


@dataclass(frozen=True)
class GradientTensor:
    """One tensor's; `ready` is the part of backward's time that has passed when it is complete."""

    parameters: int
    ready: float


@dataclass(frozen=True)
class BucketCost:
    parameters: int
    ready: float


def gradients(model: ModelConfig) -> list[GradientTensor]:
    """Of our GPT, in the order in which backward completes them.

    The tied embedding comes last, although the head, its dense part, was first: the look-up at the input adds to it
    (`split_tied` is for whoever sends the two apart).
    """
    whole = _head_flops(model) + model.layers * _block_flops(model)
    done = _head_flops(model)
    found = [GradientTensor(size, done / whole) for size in (model.width, model.width)]
    for _ in range(model.layers):
        for size, flops in _block_tensors(model):
            done += flops
            found.append(GradientTensor(size, done / whole))
    found += [GradientTensor(model.seq_len * model.width, 1.0), GradientTensor(model.vocab_size * model.width, 1.0)]
    return found


def touches_few_rows(vocab_size: int, tokens: int, world_size: int) -> bool:
    """Whether `tokens` of each rank's micro-batch leave most of the embedding alone, so that it pays to send them apart
    from the head's part (`sync/tied.py`)."""
    return world_size > 1 and tokens * world_size < _FEW_ROWS * vocab_size


def split_tied(model: ModelConfig, tokens: int, world_size: int, bucket_mb: float) -> list[BucketCost]:
    """The head's part before everything else, the rows of all ranks' tokens behind it. Those are gathered, not summed:
    half of what as many gradients would be."""
    rest = gradients(model)[:-1]
    rows = tokens * world_size * (model.width + _ROW_NUMBER) // 2
    return [BucketCost(model.vocab_size * model.width, 0.0), *fill_buckets(rest, bucket_mb), BucketCost(rows, 1.0)]


def even_gradients(parameters: int) -> list[GradientTensor]:
    """For a model of which only the size is known: equal tensors, one after another."""
    count = min(_UNKNOWN_TENSORS, parameters)
    ends = [round(parameters * (index + 1) / count) for index in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [GradientTensor(size, (index + 1) / count) for index, size in enumerate(sizes)]


def bucket_mb_for(gradient_bytes: float) -> float:
    """An eighth of the gradients, but neither crumbs nor everything at once."""
    return min(_MOST_MB, max(_LEAST_MB, gradient_bytes / _PARTS / 2**20))


def fill_buckets(
    found: Sequence[GradientTensor],
    bucket_mb: float,
    first_mb: float | None = None,
    gradient_bytes: int = _GRADIENT_BYTES,
) -> list[BucketCost]:
    """As DDP does once it has seen a backward: in order of readiness, each closed by the tensor that fills it. The
    first has a size of its own where nobody set the others'."""
    cap_bytes = int(bucket_mb * 2**20)
    return list(_filled(found, cap_bytes, int((first_mb or bucket_mb) * 2**20), gradient_bytes))


def _filled(
    found: Sequence[GradientTensor], cap_bytes: int, first_bytes: int, gradient_bytes: int
) -> Iterator[BucketCost]:
    limit, held = min(first_bytes, cap_bytes), 0
    for gradient in found:
        held += gradient.parameters
        if gradient_bytes * held >= limit:
            yield BucketCost(held, gradient.ready)
            limit, held = cap_bytes, 0
    if held:
        yield BucketCost(held, found[-1].ready)


def _head_flops(model: ModelConfig) -> float:
    return float(model.vocab_size * model.width)


def _block_flops(model: ModelConfig) -> float:
    return sum(flops for _, flops in _block_tensors(model))


def _block_tensors(model: ModelConfig) -> list[tuple[int, float]]:
    """Parameters and relative work, last layer first: bias and weight of each product, then the norm before it."""
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


# SECTION cost/lever
# Levers: the choices that trade communication against work, memory or accuracy.


Sync = Literal["ddp", "local", "diloco", "streaming", "sharded"]

# What a training can be told to do today. Whoever builds one of the others changes its line here, and plans offer it.
AVAILABLE = {
    "ddp": True,
    "local": True,
    "diloco": True,
    "streaming": True,
    "sharded": False,
    "fp32": True,
    "fp16": True,
    "bf16": True,
    "int8": True,
    "powersgd": True,
    "accumulation": True,
    "balanced": True,
    "hierarchical": True,
}


@dataclass(frozen=True)
class Lever:
    """One way to synchronise. `accumulation` multiplies the work between two exchanges, and with it the global batch.

    `every` is the number of steps from one outer exchange to the next (LocalSGD and DiLoCo; 1 for the others),
    `rank` is PowerSGD's. `bucket_mb` unset follows the model's size; plain DDP has a smaller first one. `overlap` off
    is what `sync.measure=barrier` does. `hierarchical` sums up inside each node before it goes between them. `balanced`
    deals a batch by speed instead of evenly.
    """

    sync: Sync = "ddp"
    wire: WireName = "fp32"
    accumulation: int = 1
    every: int = 1
    rank: int = DEFAULT_RANK
    bucket_mb: float | None = None
    first_bucket_mb: float | None = None
    overlap: bool = True
    hierarchical: bool = False
    balanced: bool = False

    def with_(self, **changes: object) -> Lever:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[str, ...]:
        """What of it has a line in `AVAILABLE`."""
        chosen = {
            "accumulation": self.accumulation > 1,
            "balanced": self.balanced,
            "hierarchical": self.hierarchical,
        }
        return (self.sync, self.wire, *(name for name, is_on in chosen.items() if is_on))

    @property
    def wire_setting(self) -> str:
        """As `sync.wire` has it."""
        return self.wire if self.wire != "powersgd" else f"powersgd:{self.rank}"

    @property
    def keeps_training(self) -> bool:
        """Whether it trains as one machine would, but for rounding: gradients of all ranks in every step, nothing left
        out for good. What int8 cannot say in one step it says in the next; PowerSGD needs many to say it."""
        return self.sync in ("ddp", "sharded") and self.wire != "powersgd"

    @property
    def is_available(self) -> bool:
        return all(AVAILABLE[part] for part in self.parts)

    def __str__(self) -> str:
        """`ddp, fp16, batch ×4`: what differs from plain DDP, after the way to synchronise."""
        words = [self.sync if self.every == 1 else f"{self.sync} every {self.every} steps"]
        words += [self.wire if self.wire != "powersgd" else f"powersgd rank {self.rank}"] if self.wire != "fp32" else []
        words += [f"batch ×{self.accumulation}"] if self.accumulation > 1 else []
        words += [name for name in ("balanced", "hierarchical") if name in self.parts]
        return ", ".join(words + ([] if self.overlap else ["no overlap"]))


def lever_of(sync: SyncConfig) -> Lever:
    """What the configuration asks for."""
    if sync.mode == "stock":
        return Lever(bucket_mb=STOCK_MB, first_bucket_mb=STOCK_FIRST_MB, accumulation=sync.accumulate)
    choice = sync.foreseen
    wire = parse_wire(choice.wire)
    return Lever(
        sync=choice.mode,
        wire=wire.name,
        rank=wire.rank,
        accumulation=sync.accumulate,
        every=choice.every,
        bucket_mb=sync.bucket_mb,
        overlap=sync.measure != "barrier",
    )

"""The registry of sync methods and wire formats, and the choice of one of each.

`SYNC_METHODS` and `WIRE_FORMATS` are the only lists of their names. Settings are validated against them, and the cost
model, plans, benchmarks and help texts read their facts from them. A new wire format needs an entry here, an
implementation in `sync/compression` and a paragraph in docs/wires.md; a new sync method needs an entry here, an
implementation in `sync/outer.py`, its step time in `cost/predict.py` and a paragraph in docs/sync.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DILOCO_ROUND_STEPS = 50
# Columns that PowerSGD keeps of a matrix unless the setting names another number.
DEFAULT_RANK = 4
# bf16 and int8 are sent in blocks of this many numbers.
BLOCK_NUMBERS = 256


@dataclass(frozen=True)
class SyncMethod:
    """How replicas agree."""

    name: str
    title: str  # its name in a sentence
    description: str
    # Its price in accuracy, memory or bytes, as a plan's table names it; empty for exact DDP.
    price: str = ""
    # Default number of steps between two exchanges of parameters; None where gradients are exchanged in every step.
    round_steps: int | None = None
    # Copies of the parameters that a rank keeps for the outer optimizer.
    outer_copies: int = 0
    # What is divided among the ranks: 1 the optimizers' moments, 2 gradients too, 3 weights too. 0: every rank has all.
    shard_level: int = 0
    # The optional settings of section `sync` that have an effect.
    settings: tuple[str, ...] = ()
    # Whether `--sync auto`, a plan and the events of a run can name it as the method that is in use.
    is_choice: bool = False
    # Whether `--sync auto` may choose it instead of `ddp`.
    in_auto: bool = False
    # The settings that it stands for, where it is only a shorter way to write them.
    shorthand: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_outer(self) -> bool:
        """Whether replicas train on their own between two exchanges of parameters."""
        return self.round_steps is not None

    @property
    def is_sharded(self) -> bool:
        return self.shard_level > 0

    @property
    def usage(self) -> str:
        return f"{self.name}:STEPS" if self.is_outer else self.name


_SHARDED_SETTINGS = ("bucket_mb", "copies")
_OUTER_SETTINGS = ("every", "outer_lr", "outer_momentum", "bucket_mb")
_STREAMING_SETTINGS = (*_OUTER_SETTINGS, "fragments", "overlap")

SYNC_METHODS = {
    method.name: method
    for method in (
        SyncMethod("ddp", "DDP", "gradients in every step", settings=("bucket_mb",), is_choice=True),
        SyncMethod("stock", "stock DDP", "plain DistributedDataParallel with its defaults, to compare with"),
        SyncMethod("accumulate", "DDP", "ddp with four times the batch", shorthand={"mode": "ddp", "accumulate": 4}),
        SyncMethod(
            "local",
            "LocalSGD",
            "the average of the parameters, once a round",
            "replicas drift for {every} steps",
            round_steps=8,
            outer_copies=1,
            settings=("every", "bucket_mb"),
            is_choice=True,
        ),
        SyncMethod(
            "diloco",
            "DiLoCo",
            "an outer optimizer moves along the average, once a round",
            "replicas drift for {every} steps",
            round_steps=DILOCO_ROUND_STEPS,
            outer_copies=2,
            settings=_OUTER_SETTINGS,
            is_choice=True,
            in_auto=True,
        ),
        SyncMethod(
            "streaming",
            "Streaming DiLoCo",
            "DiLoCo in fragments, which are exchanged while training continues",
            "as diloco, applied later",
            round_steps=DILOCO_ROUND_STEPS,
            outer_copies=2,
            settings=_STREAMING_SETTINGS,
            is_choice=True,
            in_auto=True,
        ),
        SyncMethod(
            "auto",
            "auto",
            "the first steps choose between ddp, diloco and streaming",
            settings=(*_STREAMING_SETTINGS, "planned", "planned_step_s"),
        ),
        SyncMethod(
            "zero1",
            "ZeRO-1",
            "ddp with the optimizers' moments divided among the ranks",
            shard_level=1,
            settings=_SHARDED_SETTINGS,
            is_choice=True,
        ),
        SyncMethod(
            "zero2",
            "ZeRO-2",
            "moments and gradients divided among the ranks",
            "gradients sent for every micro-batch",
            shard_level=2,
            settings=_SHARDED_SETTINGS,
            is_choice=True,
        ),
        SyncMethod(
            "zero3",
            "ZeRO-3",
            "moments, gradients and weights divided among the ranks",
            "half as many bytes again, for every micro-batch",
            shard_level=3,
            settings=("copies", "units"),
            is_choice=True,
        ),
    )
}
# What `--sync` accepts in a training, and what `sync.mode` may be.
TRAIN_METHODS = tuple(SYNC_METHODS)
SYNC_MODES = tuple(name for name in TRAIN_METHODS if not SYNC_METHODS[name].shorthand)
# Those that train in different ways; `auto` chooses one of them.
TRAINED_METHODS = tuple(name for name in TRAIN_METHODS if name != "auto")
# What a training can do in one step, and what a plan can compare.
CHOICE_MODES = tuple(name for name, method in SYNC_METHODS.items() if method.is_choice)
PLAN_METHODS = CHOICE_MODES
PLAN_USAGES = tuple(SYNC_METHODS[name].usage for name in PLAN_METHODS)
OUTER_METHODS = tuple(name for name, method in SYNC_METHODS.items() if method.is_outer)
SHARDED_METHODS = tuple(name for name, method in SYNC_METHODS.items() if method.is_sharded)
SYNC_HELP = "; ".join(f"{name}: {SYNC_METHODS[name].description}" for name in TRAIN_METHODS)
ROUND_STEPS_TEXT = " or ".join(dict.fromkeys(str(SYNC_METHODS[name].round_steps) for name in OUTER_METHODS))


@dataclass(frozen=True)
class WireFormat:
    """The encoding in which gradients or parameters are exchanged."""

    name: str
    description: str
    # Its price in accuracy, as a plan's table names it behind "gradients"; empty for the exact format.
    price: str
    # Bytes of `BLOCK_NUMBERS` numbers; PowerSGD's depend on the shape of a matrix.
    block_bytes: int
    # Seconds of one thread to encode and decode one parameter.
    thread_s: float = 0.0
    # Bytes of memory that encoding and decoding one parameter reads and writes: the cost on a GPU.
    memory_bytes: int = 0
    # Whether the numbers are sent in whole blocks, each with its own header.
    has_blocks: bool = False
    # Whether a matrix is sent as two factors of the rank given behind the name, one after the other.
    is_low_rank: bool = False
    # Whether a rank keeps what the format left out of a gradient, and adds it to the next one.
    has_error_feedback: bool = False
    # Whether it is exchanged by gloo, on the processor, also between GPUs that NCCL connects.
    needs_gloo: bool = False
    # Whether a model learns with it as with fp32, except for rounding: a plan recommends only such formats.
    keeps_training: bool = False
    # Whether `--sync auto` may choose it.
    in_auto: bool = False
    # False: only `shoal plan` knows it.
    is_available: bool = True

    @property
    def number_bytes(self) -> float:
        return self.block_bytes / BLOCK_NUMBERS

    @property
    def usage(self) -> str:
        return f"{self.name}:RANK" if self.is_low_rank else self.name


# Encoding times were measured for 124M parameters between two ranks (docs/measurements.md): fp16 in torch on x86 (the
# native kernel on an ARM core takes half of that), the others with the native kernels. A block of int8 carries its
# scale.
WIRE_FORMATS = {
    wire.name: wire
    for wire in (
        WireFormat("fp32", "exact", "", 4 * BLOCK_NUMBERS, keeps_training=True, in_auto=True),
        WireFormat(
            "fp16",
            "half the bytes",
            "keep 11 bits",
            2 * BLOCK_NUMBERS,
            0.15 / 124e6,
            memory_bytes=12,
            keeps_training=True,
            in_auto=True,
        ),
        WireFormat(
            "bf16",
            "half the bytes",
            "keep 8 bits",
            2 * BLOCK_NUMBERS,
            0.27 / 124e6,
            memory_bytes=12,
            has_blocks=True,
            needs_gloo=True,
            keeps_training=True,
        ),
        WireFormat(
            "int8",
            "a quarter of the bytes",
            "keep 8 bits a block",
            BLOCK_NUMBERS + 4,
            0.3 / 124e6,
            memory_bytes=30,
            has_blocks=True,
            has_error_feedback=True,
            needs_gloo=True,
            keeps_training=True,
            in_auto=True,
        ),
        WireFormat(
            "powersgd",
            "two factors of a low rank for each matrix",
            "of rank {rank}",
            4 * BLOCK_NUMBERS,
            0.71 / 124e6,
            memory_bytes=40,
            is_low_rank=True,
            has_error_feedback=True,
            needs_gloo=True,
        ),
    )
}
WIRE_USAGES = tuple(wire.usage for wire in WIRE_FORMATS.values())
WIRE_HELP = "; ".join(f"{wire.usage}: {wire.description}" for wire in WIRE_FORMATS.values())
AUTO_WIRES = tuple(wire.name for wire in WIRE_FORMATS.values() if wire.in_auto)


def join_or(words: tuple[str, ...]) -> str:
    """Return `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@dataclass(frozen=True)
class WireChoice:
    name: str
    rank: int = DEFAULT_RANK  # only low-rank formats have one

    @property
    def format(self) -> WireFormat:
        return WIRE_FORMATS[self.name]

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}" if self.format.is_low_rank else self.name


def parse_wire(text: str) -> WireChoice:
    """Read `int8`, `powersgd` or `powersgd:8`."""
    name, colon, number = text.partition(":")
    wire = WIRE_FORMATS.get(name)
    has_rank = number.isascii() and number.isdecimal() and int(number) > 0
    if wire is None or (colon and not (wire.is_low_rank and has_rank)):
        names = join_or((*WIRE_FORMATS, *(wire.usage for wire in WIRE_FORMATS.values() if wire.is_low_rank)))
        raise ValueError(f"there is no wire format {text!r}: use {names}")
    return WireChoice(name, int(number) if colon else DEFAULT_RANK)


def split_short_form(text: str) -> dict[str, str]:
    """Return the settings of section `sync` that `diloco:50+int8` or `int8` stands for in plans and benchmarks.

    Empty for any other text.
    """
    name, _, wire = ("ddp", "", text) if text.partition(":")[0] in WIRE_FORMATS else text.partition("+")
    mode, colon, every = name.partition(":")
    settings = {"mode": mode, **({"every": every} if colon else {}), **({"wire": wire} if wire else {})}
    is_known = mode in TRAIN_METHODS and (not colon or (SYNC_METHODS[mode].is_outer and every.isdecimal()))
    return settings if is_known and len(settings) > 1 else {}


_CHOICE = re.compile(r"([a-z]+[0-9]?):([1-9]\d{0,8}),(.+)")


@dataclass(frozen=True)
class SyncChoice:
    """What `--sync auto` chooses, a plan recommends, and events and settings keep."""

    mode: str = "ddp"
    wire: str = "fp32"
    every: int = 1  # steps between two exchanges

    @property
    def is_outer(self) -> bool:
        return SYNC_METHODS[self.mode].is_outer

    @property
    def text(self) -> str:
        """The form in a setting, which `parse_choice` reads."""
        return f"{self.mode}:{self.every},{self.wire}"

    def __str__(self) -> str:
        interval = f" every {self.every:,} steps" if self.is_outer else ""
        return f"{self.mode}{interval} in {self.wire}"


def parse_choice(text: str) -> SyncChoice:
    """Read `diloco:50,fp16` or `ddp:1,int8`."""
    match = _CHOICE.fullmatch(text)
    if match is None or match[1] not in CHOICE_MODES:
        raise ValueError(f"{text!r} is no sync choice: write for example diloco:50,fp16 or ddp:1,fp32")
    parse_wire(match[3])
    return SyncChoice(match[1], match[3], int(match[2]))


def choice_of_event(record: Mapping[str, Any]) -> SyncChoice | None:
    """Return the choice that an event records; None where it records none that can be read."""
    try:
        return parse_choice(f"{record.get('sync')}:{record.get('round_steps')},{record.get('wire')}")
    except ValueError:
        return None

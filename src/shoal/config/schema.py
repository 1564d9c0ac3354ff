"""The configuration of a run: one small model per component.

The command line builds the whole configuration once, validates it before any process starts and saves it as
`config.toml` in the run folder, where the ranks read it. Each component gets only its own section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.config import defaults
from shoal.config.sync_choice import SYNC_METHODS, SYNC_MODES, SyncChoice, join_or, parse_choice, parse_wire

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Below 2**32: the seeds of ranks and steps are multiples of this one, and torch takes 64 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]

# Streaming DiLoCo loses little when fragments arrive up to five steps late, and more beyond.
_OVERLAP_STEPS = 5


class Section(BaseModel):
    """A frozen model that refuses unknown keys: a typo must not silently train something else."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The shape of the GPT."""

    layers: Positive = 3
    heads: Positive = 3
    width: Positive = 192
    seq_len: Positive = 64
    # 0 takes the tokenizer's; set it to keep a published size (GPT-2 has 50,257) whatever the text needs.
    vocab_size: NotNegative = 0
    dropout: Fraction = 0.0

    @model_validator(mode="after")
    def _check_heads_divide_width(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} must be a multiple of model.heads={self.heads}")
        return self


class DataConfig(Section):
    """What to train on."""

    path: Path | None = None
    # The text without `path`: sentences with English verbs are generated, or two plays that come with shoal.
    builtin: Literal["grammar", "shakespeare"] = "grammar"
    tokenizer: Literal["char", "byte", "bpe"] = "bpe"
    bpe_vocab: Annotated[int, Field(ge=257, le=65_536)] = 2048
    val_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    # `cursor` divides one global shuffled order among the ranks of the moment, so that training does not depend on
    # their number. `modulo` is the textbook way: a rank sees only samples with `index % world_size == rank`.
    sharding: Literal["cursor", "modulo"] = "cursor"
    sentences: Annotated[int, Field(ge=100)] = 40_000
    seed: Seed = defaults.SEED
    cache_dir: Path | None = None

    @field_validator("path", "cache_dir")
    @classmethod
    def _check_utf8(cls, value: Path | None) -> Path | None:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the name {str(value)!a} is not UTF-8, which config.toml must be; rename it") from None
        return value


class LoopConfig(Section):
    """The steps of any training. Batches are counted in samples."""

    steps: Positive = 100
    # Samples per step of all ranks together; with weak scaling of each rank.
    global_batch: Positive = 16
    # Unset: chosen so that all ranks get equal work. Lower it when a rank runs out of memory.
    micro_batch: Positive | None = None
    scaling: Literal["strong", "weak"] = "strong"
    # The number of terms in the loss of a sample differs between samples, as that of tokens in padded texts.
    count_varies: bool = False
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 3
    gc_every: Positive = 100
    seed: Seed = defaults.SEED
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Whether every rank keeps cores of its own; `auto` where ranks could disturb each other and there are enough cores.
    pin: Literal["auto", "on", "off"] = "auto"


class TrainConfig(LoopConfig):
    """The optimisation of the GPT. A sample is a sequence of `model.seq_len` tokens."""

    # Belongs to `base_batch`, and scales linearly with the real global batch.
    lr: Annotated[float, Field(gt=0)] = 2e-3
    base_batch: Positive = 16
    warmup_steps: NotNegative = 10
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    clip: Annotated[float, Field(gt=0)] = 1.0
    eval_every: Positive = 50
    eval_sequences: Positive = 120
    # `auto` compiles the model's blocks where a trial on this machine shows that the run gains more than compiling
    # takes; without a C++ compiler it is `off`.
    compile: Literal["auto", "on", "off"] = "auto"
    # Of matrix products: `bf16` is faster where the device has it and rounds to 8 bits; `auto` lets a trial choose.
    # Unset: bf16 on a GPU that has it, fp32 elsewhere. On a GPU fp32 products are rounded to TF32.
    precision: Literal["fp32", "bf16", "auto"] | None = None


class SyncConfig(Section):
    """How replicas agree; see docs/sync.md."""

    # A name of `SYNC_METHODS`. `auto` starts with `ddp`, and its first steps choose between that, `diloco` and
    # `streaming`, and the wire format unless it is given.
    mode: str = "ddp"
    # A name of `WIRE_FORMATS`, for PowerSGD with its rank: `powersgd:8` (docs/wires.md).
    wire: str = "fp32"
    # Multiplies the batch, and so the work between two exchanges of gradients.
    accumulate: Positive = 1
    # Steps between two exchanges of parameters. Raise it when the network is what a run waits for.
    every: Positive | None = None
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    outer_momentum: Fraction = 0.9
    fragments: Annotated[int, Field(ge=1, le=32)] = 4
    # Steps that an exchange of a fragment may take. Unset: five, or a fragment's turn where that is shorter. Raise it
    # when ranks still wait.
    overlap: Positive | None = None
    # `hook` times every all-reduce inside DDP's overlap. `barrier` switches the overlap off and puts barriers around
    # backward and all-reduce: exact figures, but a slower step. `off` times only the step as a whole.
    measure: Literal["hook", "barrier", "off"] = "hook"
    # Size of a bucket: smaller ones hide more of the exchange behind backward, but each costs a message. Unset: it
    # follows the model's size.
    bucket_mb: Annotated[float, Field(gt=0)] | None = None
    # How ranks of one machine exchange gradients: `shared` keeps them in shared memory, `copies` copies the buckets of
    # torch's own DDP through it; between machines one rank of each uses the network. `gloo` is TCP between all ranks,
    # `auto` is `shared` where possible (docs/inside.md).
    inside: Literal["auto", "gloo", "copies", "shared"] = "auto"
    # The choice and the step time that a plan expected of `auto`.
    planned: str | None = None
    planned_step_s: Annotated[float, Field(gt=0)] | None = None
    join_timeout_s: Annotated[float, Field(gt=0)] = defaults.JOIN_TIMEOUT_S
    # Raise it when a healthy but slow peer is taken for dead.
    timeout_s: Annotated[float, Field(gt=0)] = defaults.SYNC_TIMEOUT_S

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, values: Any) -> Any:
        mode = values.get("mode") if isinstance(values, dict) else None
        shorthand = SYNC_METHODS[mode].shorthand if isinstance(mode, str) and mode in SYNC_METHODS else {}
        return {**shorthand, **values, "mode": shorthand["mode"]} if shorthand else values

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, value: str) -> str:
        if value not in SYNC_MODES:
            raise ValueError(f"there is no such sync method: use {join_or(SYNC_MODES)}")
        return value

    @field_validator("wire")
    @classmethod
    def _check_wire(cls, value: str) -> str:
        parse_wire(value)
        return value

    @field_validator("planned")
    @classmethod
    def _check_planned(cls, value: str | None) -> str | None:
        if value is not None:
            parse_choice(value)
        return value

    @model_validator(mode="after")
    def _check_combination(self) -> SyncConfig:
        if self.mode == "stock" and self.wire != "fp32":
            raise ValueError(f"sync.wire={self.wire} needs sync.mode=ddp: stock DDP sends fp32")
        if (self.is_outer or self.mode == "auto") and parse_wire(self.wire).format.is_low_rank:
            raise ValueError(f"sync.wire={self.wire} is made for gradients: it needs sync.mode=ddp")
        if self.mode != "ddp" and self.measure == "barrier":
            raise ValueError("sync.measure=barrier takes the all-reduce out of DDP: it needs sync.mode=ddp")
        if self.mode == "auto" and self.measure != "hook":
            raise ValueError(
                f"sync.measure={self.measure} needs a fixed sync.mode: auto chooses by what the hook measures"
            )
        if self.mode == "stock" and self.inside in ("copies", "shared"):
            raise ValueError(f"sync.inside={self.inside} needs sync.mode=ddp: stock DDP sends by gloo")
        if self.mode == "streaming" and self.fragments > self.round_steps:
            raise ValueError(f"sync.fragments={self.fragments} must not be more than sync.every={self.round_steps}")
        if self.mode == "streaming" and self.overlap_steps > self.round_steps:
            raise ValueError(f"sync.overlap={self.overlap} must not be more than sync.every={self.round_steps}")
        return self

    @property
    def is_outer(self) -> bool:
        """Whether replicas train on their own between two exchanges of parameters."""
        return SYNC_METHODS[self.mode].is_outer

    @property
    def round_steps(self) -> int:
        """Steps from one exchange of everything to the next."""
        return self.every_in(self.mode) if self.is_outer else 1

    def every_in(self, mode: str) -> int:
        """Return the steps of a round of an outer method."""
        return self.every or SYNC_METHODS[mode].round_steps or 1

    @property
    def overlap_steps(self) -> int:
        """Steps that an exchange of a fragment may take."""
        return self.overlap or max(1, min(_OVERLAP_STEPS, self.round_steps // self.fragments))

    @property
    def can_stream(self) -> bool:
        """Whether a round has room for the fragments."""
        streaming = self.with_choice(SyncChoice("streaming", every=self.every_in("streaming")))
        return max(streaming.fragments, streaming.overlap_steps) <= streaming.round_steps

    @property
    def expected_choice(self) -> SyncChoice:
        """What a training does with these settings, as far as that is known before it starts."""
        if self.mode == "stock":
            return SyncChoice()
        if self.mode == "auto":
            return parse_choice(self.planned) if self.planned else SyncChoice("ddp", self.wire)
        return SyncChoice(self.mode, self.wire, self.round_steps)

    @property
    def first_settings(self) -> SyncConfig:
        """What the first steps do. `auto` starts with `ddp`: replicas that exchange gradients can part later, but not
        the other way round."""
        if self.mode != "auto":
            return self
        return self.with_choice(SyncChoice("ddp", self.expected_choice.wire))

    def with_choice(self, choice: SyncChoice) -> SyncConfig:
        """Return these settings with `choice` in place of `auto`."""
        every = choice.every if choice.is_outer else self.every
        return self.model_copy(update={"mode": choice.mode, "wire": choice.wire, "every": every})


class RunConfig(Section):
    """Where and how the ranks are started."""

    preset: str = "grammar"
    on: str = "local:2"
    launcher: Literal["shoal", "torchrun", "spawn"] = "shoal"
    # Unset: the node's cores divided by its ranks.
    threads: Positive | None = None
    # `1/1/0.5` gives a slow machine a smaller share of every batch, one number per rank; unset, all are equal. A hosts
    # file sets it from the `weight` of its machines.
    weights: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(/\d+(\.\d+)?)*$")] | None = None
    # Whether shares follow the measured speed of the ranks. `off`: they stay as they were at the start; `static`: they
    # are measured once, in the first steps; `live`: they follow. Unset: as `live`, once machines differ by more than
    # 10%; but `weights` are kept, and so are the equal shares of ranks on one machine.
    balance: Literal["off", "static", "live"] | None = None
    # `cuda/cpu/cpu` gives each rank a device of its own; unset, all have `train.device`. Ranks without a GPU and ranks
    # with one train together; give them `weights` too.
    devices: Annotated[str, Field(pattern=r"^(auto|cpu|cuda)(/(auto|cpu|cuda))*$")] | None = None
    # Which lineage a resumed run continues, where its machines have two.
    lineage: Annotated[str, Field(pattern=r"^(\d+-\d+)?$")] = ""


class MembersConfig(Section):
    """What happens when machines leave, fall silent or join; see docs/faults.md."""

    # `go-on` continues with the members that are left; `end` ends the run, as torchrun without restarts does.
    on_loss: Literal["go-on", "end"] = "go-on"
    # What half of the machines do when they receive nothing from the other half.
    on_silent_tie: Literal["continue", "pause"] = "continue"
    min_nodes: Positive = defaults.MIN_NODES  # with fewer, training pauses
    max_nodes: Annotated[int, Field(ge=1, le=defaults.MAX_NODES)] = defaults.MAX_NODES  # further nodes must wait
    # Raise it when busy machines or a bad Wi-Fi are taken for absent ones.
    silent_after_s: Annotated[float, Field(ge=1)] = defaults.SILENT_AFTER_S
    restarts: NotNegative = defaults.RESTARTS  # how often an agent restarts a rank that was killed
    digest_every: Positive = 50  # steps between two comparisons of all replicas, bit by bit

    @model_validator(mode="after")
    def _check_limits(self) -> MembersConfig:
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes={self.max_nodes} is less than min_nodes={self.min_nodes}")
        return self


class EngineConfig(Section):
    """The settings of any training, whatever its model and data are."""

    train: LoopConfig = LoopConfig()
    sync: SyncConfig = SyncConfig()
    run: RunConfig = RunConfig()
    members: MembersConfig = MembersConfig()

    def device_of(self, rank: int) -> str:
        """Return what is configured for this rank: `auto`, `cpu` or `cuda`."""
        devices = self.run.devices.split("/") if self.run.devices else []
        return devices[rank] if rank < len(devices) else self.train.device


class Config(EngineConfig):
    """The settings of shoal's own GPT."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

"""The configuration of a run: one small model per component.

Each part is handed only its own section. The command line builds the whole once, validates it before any process
starts and saves it as `config.toml` in the run folder, where the workers read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.config.sync_choice import ChosenMode, SyncChoice, parse_choice, parse_wire

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Room above it: a rank's and a step's own seeds are multiples of this one, and torch takes 64 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]

DEFAULT_SEED = 35_000

# Steps of a round by mode; the modes that have no line exchange gradients in every step.
ROUND_STEPS = {"local": 8, "diloco": 50, "streaming": 50}
# Streaming loses little by fragments that come up to five steps late, and more beyond.
_OVERLAP = 5
_ACCUMULATE = 4


class Section(BaseModel):
    """Frozen, and refuses a key it does not know: a typo must not silently train something else."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The shape of the GPT.

    `vocab_size` 0 takes the tokenizer's; set it to keep a published size (GPT-2 has 50,257) whatever the text needs.
    """

    layers: Positive = 3
    heads: Positive = 3
    width: Positive = 192
    seq_len: Positive = 64
    vocab_size: NotNegative = 0
    dropout: Fraction = 0.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} must be a multiple of model.heads={self.heads}")
        return self


class DataConfig(Section):
    """What to train on. Without `path` it is the `builtin` text: `grammar` generates sentences with English verbs,
    `shakespeare` is two plays that come with shoal.

    `sharding`: `cursor` deals one global shuffled order over whoever is in the world, so the training does not depend
    on the number of ranks. `modulo` is the classroom way: a rank only sees samples with `index % world_size == rank`.
    """

    path: Path | None = None
    builtin: Literal["grammar", "shakespeare"] = "grammar"
    tokenizer: Literal["char", "byte", "bpe"] = "bpe"
    bpe_vocab: Annotated[int, Field(ge=257, le=65_536)] = 2048
    val_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    sharding: Literal["cursor", "modulo"] = "cursor"
    sentences: Annotated[int, Field(ge=100)] = 40_000
    seed: Seed = DEFAULT_SEED
    cache_dir: Path | None = None

    @field_validator("path", "cache_dir")
    @classmethod
    def _can_be_saved(cls, value: Path | None) -> Path | None:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the name {str(value)!a} is not UTF-8, which config.toml must be; rename it") from None
        return value


class TrainConfig(Section):
    """The optimisation. Batches are counted in sequences of `model.seq_len` tokens.

    `global_batch` is what one step of the whole world uses; each rank's share is derived from it. With `scaling="weak"`
    it is what *each rank* uses, and the world's batch grows with the number of ranks. `micro_batch` unset is chosen so
    that all ranks get equal work; set it lower when a rank runs out of memory.
    `lr` belongs to `base_batch` and scales linearly with the world's real batch.

    `compile`: `auto` compiles the model's blocks where a trial on this machine says that the run gains more than
    compiling takes; without a C++ compiler it is `off`. `precision` is what matrices are multiplied in: `bf16` is
    faster on processors that have it and rounds to 8 bits; `auto` lets a trial choose. `pin` keeps every rank on cores
    of its own: `auto` where ranks could get into each other's way and there are cores enough.
    """

    steps: Positive = 100
    global_batch: Positive = 16
    micro_batch: Positive | None = None
    scaling: Literal["strong", "weak"] = "strong"
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
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 3
    gc_every: Positive = 100
    seed: Seed = DEFAULT_SEED
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    pin: Literal["auto", "on", "off"] = "auto"


class SyncConfig(Section):
    """How replicas agree; see docs/sync.md.

    `mode`: `ddp` exchanges gradients in every step. In three others each rank takes steps of its own, and parameters
    are exchanged once in `every` steps (unset 8 for `local`, 50 for the others): raise it when the network is what a
    run waits for. `local` (LocalSGD) takes the average; `diloco` lets an outer optimizer with `outer_lr` and
    `outer_momentum` move along it; `streaming` does the same in so many `fragments`, each on its way for `overlap`
    steps while training goes on (unset five, or a fragment's turn where that is shorter): raise it when ranks still
    wait. `stock` is plain `DistributedDataParallel` with its defaults, to compare with. `accumulate` multiplies the
    batch, and with it the work between two exchanges of gradients; `mode="accumulate"` is `ddp` with four times the
    batch. `auto` begins with `ddp`, and lets its first steps choose between that, `diloco` and `streaming`, and the
    wire format unless it is given; `planned` and `planned_step_s` are what a plan expected of that choice.

    `wire` is the form in which an exchange travels: `fp16` and `bf16` are half the bytes, `int8` a quarter,
    `powersgd:R` far less still, each at the price of precision (docs/wires.md). `inside` is how ranks of one machine
    exchange gradients: `shared` lets them live in memory that the ranks share, `copies` copies the buckets of torch's
    own DDP through it; of several machines one rank each then uses the wire. `gloo` is TCP between all ranks, `auto`
    is `shared` where it can be (docs/inside.md).

    `measure`: `hook` times every all-reduce where it happens, inside DDP's overlap; `barrier` switches the overlap off
    and puts barriers around backward and all-reduce, which gives clean figures and a slower step; `off` times only the
    step as a whole. Raise `timeout_s` when a healthy but slow peer is taken for dead. `bucket_mb` is how much travels
    together: less hides more of it behind backward, and costs a message each; unset it follows the model's size.
    """

    mode: Literal["ddp", "stock", "local", "diloco", "streaming", "auto"] = "ddp"
    wire: str = "fp32"
    accumulate: Positive = 1
    every: Positive | None = None
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    outer_momentum: Fraction = 0.9
    fragments: Annotated[int, Field(ge=1, le=32)] = 4
    overlap: Positive | None = None
    measure: Literal["hook", "barrier", "off"] = "hook"
    bucket_mb: Annotated[float, Field(gt=0)] | None = None
    inside: Literal["auto", "gloo", "copies", "shared"] = "auto"
    planned: str | None = None
    planned_step_s: Annotated[float, Field(gt=0)] | None = None
    join_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    timeout_s: Annotated[float, Field(gt=0)] = 60.0

    @field_validator("wire")
    @classmethod
    def _wire_is_known(cls, value: str) -> str:
        parse_wire(value)
        return value

    @field_validator("planned")
    @classmethod
    def _plan_is_known(cls, value: str | None) -> str | None:
        if value is not None:
            parse_choice(value)
        return value

    @property
    def is_outer(self) -> bool:
        """Whether replicas part between exchanges."""
        return self.mode in ROUND_STEPS

    @property
    def round_steps(self) -> int:
        """Steps from one exchange of everything to the next."""
        return self.every_in(self.mode) if self.is_outer else 1

    def every_in(self, mode: str) -> int:
        return self.every or ROUND_STEPS[mode]

    @property
    def overlap_steps(self) -> int:
        """For how many steps a fragment may be on its way."""
        return self.overlap or max(1, min(_OVERLAP, self.round_steps // self.fragments))

    @property
    def foreseen(self) -> SyncChoice:
        """What a training does with these settings, as far as that is known before it has begun."""
        if self.mode == "stock":
            return SyncChoice()
        if self.mode == "auto":
            return parse_choice(self.planned) if self.planned else SyncChoice("ddp", self.wire)
        return SyncChoice(self.mode, self.wire, self.round_steps)

    @property
    def can_stream(self) -> bool:
        """Whether a round has room for the fragments."""
        streaming = self.settled(SyncChoice("streaming", every=self.every_in("streaming")))
        return max(streaming.fragments, streaming.overlap_steps) <= streaming.round_steps

    @property
    def begun(self) -> SyncConfig:
        """What the first steps do: replicas that exchange gradients can part later, but not the other way round."""
        if self.mode != "auto":
            return self
        return self.settled(SyncChoice("ddp", self.foreseen.wire))

    def settled(self, choice: SyncChoice) -> SyncConfig:
        """With nothing left to choose."""
        mode: ChosenMode = choice.mode
        every = choice.every if choice.is_outer else self.every
        return self.model_copy(update={"mode": mode, "wire": choice.wire, "every": every})

    @model_validator(mode="before")
    @classmethod
    def _accumulate_is_ddp(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mode") == "accumulate":
            return {"accumulate": _ACCUMULATE, **values, "mode": "ddp"}
        return values

    @model_validator(mode="after")
    def _stock_is_stock(self) -> SyncConfig:
        if self.mode == "stock" and self.wire != "fp32":
            raise ValueError(f"sync.wire={self.wire} needs sync.mode=ddp: stock DDP sends fp32")
        if (self.is_outer or self.mode == "auto") and self.wire.startswith("powersgd"):
            raise ValueError(f"sync.wire={self.wire} is made for gradients: it needs sync.mode=ddp")
        if self.mode != "ddp" and self.measure == "barrier":
            raise ValueError("sync.measure=barrier takes the all-reduce out of DDP: it needs sync.mode=ddp")
        if self.mode == "auto" and self.measure != "hook":
            raise ValueError(
                f"sync.measure={self.measure} needs a fixed sync.mode: auto chooses by what the hook measures"
            )
        if self.mode == "stock" and self.inside in ("copies", "shared"):
            raise ValueError(f"sync.inside={self.inside} needs sync.mode=ddp: stock DDP sends by gloo")
        return self

    @model_validator(mode="after")
    def _rounds_have_room(self) -> SyncConfig:
        if self.mode == "streaming" and self.fragments > self.round_steps:
            raise ValueError(f"sync.fragments={self.fragments} must not be more than sync.every={self.round_steps}")
        if self.mode == "streaming" and self.overlap_steps > self.round_steps:
            raise ValueError(f"sync.overlap={self.overlap} must not be more than sync.every={self.round_steps}")
        return self


class RunConfig(Section):
    """Where and how the ranks are started. `threads` unset is the node's cores divided by its ranks.

    `weights` such as 1/1/0.5 give a slow machine a smaller share of every batch, one number a rank; unset, all are
    equal. A hosts file sets it from the `weight` of its machines. `lineage`: the training that a resumed run goes on
    with, where its machines have two.
    """

    preset: str = "grammar"
    on: str = "local:2"
    launcher: Literal["shoal", "torchrun", "spawn"] = "shoal"
    threads: Positive | None = None
    weights: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(/\d+(\.\d+)?)*$")] | None = None
    lineage: Annotated[str, Field(pattern=r"^(\d+-\d+)?$")] = ""


class MembersConfig(Section):
    """What becomes of a run when machines leave, fall silent, or come. See docs/faults.md.

    `on_loss`: `go-on` trains on with whoever is left; `end` ends the run, as torchrun without restarts does.
    `on_silent_tie`: what half of the machines do that hear nothing of the other half. With fewer than `min_nodes`
    nobody trains; more than `max_nodes` are not let in. `silent_after_s`: raise it when busy machines or a bad Wi-Fi
    are taken for absent ones. `restarts`: how often an agent starts a rank again that was killed. `digest_every`: after
    so many steps all replicas are compared, bit by bit.
    """

    on_loss: Literal["go-on", "end"] = "go-on"
    on_silent_tie: Literal["continue", "pause"] = "continue"
    min_nodes: Positive = 1
    max_nodes: Annotated[int, Field(ge=1, le=64)] = 64
    silent_after_s: Annotated[float, Field(ge=1)] = 2.5
    restarts: NotNegative = 3
    digest_every: Positive = 50

    @model_validator(mode="after")
    def _most_are_not_fewer(self) -> MembersConfig:
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes={self.max_nodes} is less than min_nodes={self.min_nodes}")
        return self


class Config(Section):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    run: RunConfig = RunConfig()
    members: MembersConfig = MembersConfig()

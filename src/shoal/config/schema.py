"""The configuration of a run: one small model per component.

The command line builds the whole configuration once, validates it before any process starts and saves it as
`config.toml` in the run folder, where the ranks read it. Each component gets only its own section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.config import defaults
from shoal.config.sync_choice import (
    SYNC_METHODS,
    SYNC_MODES,
    TRAIN_METHODS,
    SyncChoice,
    join_or,
    parse_choice,
    parse_wire,
)

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Below 2**32: the seeds of ranks and steps are multiples of this one, and torch takes 64 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]

Device = Literal["auto", "cpu", "cuda"]
DEVICES = get_args(Device)

# Streaming DiLoCo loses little when fragments arrive up to five steps late, and more beyond.
_OVERLAP_STEPS = 5


class Section(BaseModel):
    """A frozen model that refuses unknown keys: a typo must not silently train something else."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The shape of the GPT."""

    layers: Positive = 3
    """Transformer blocks.

    More make a better and slower model; `--depth` sets layers, heads and width together.
    """

    heads: Positive = 3
    """Attention heads of a block. They must divide `model.width`.

    Change it together with the width, so that a head keeps about 64 numbers.
    """

    width: Positive = 192
    """Numbers that represent one token inside the model.

    The parameters grow with its square; see `shoal plan` for what that costs.
    """

    seq_len: Positive = 64
    """Tokens of a sequence, which is one sample.

    Raise it for texts with long contexts; memory and time grow with it.
    """

    vocab_size: NotNegative = 0
    """Rows of the token table; 0 takes the tokenizer's.

    Set it to keep a published size (GPT-2 has 50,257) whatever the text needs.
    """

    dropout: Fraction = 0.0
    """Part of the activations that is set to zero while training.

    Raise it to 0.1 or 0.2 when the validation loss rises while the training loss falls.
    """

    @model_validator(mode="after")
    def _check_heads_divide_width(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} must be a multiple of model.heads={self.heads}")
        return self


class DataConfig(Section):
    """What to train on."""

    path: Path | None = None
    """The text file, or a folder of text files, to train on.

    Name your own text here, or with `--data`.
    """

    builtin: Literal["grammar", "shakespeare"] = "grammar"
    """The text without `data.path`: sentences with English verbs that shoal generates, or two plays that come
    with it.

    Take `shakespeare` for a text that people wrote.
    """

    tokenizer: Literal["char", "byte", "bpe"] = "bpe"
    """How text becomes tokens: `char`, `byte`, or pairs that are learned from the text (`bpe`).

    Take `char` for a tiny text, `byte` for data that is no text.
    """

    bpe_vocab: Annotated[int, Field(ge=257, le=65_536)] = 2048
    """Tokens that `bpe` learns.

    Raise it for a large text: fewer tokens for the same text, but a larger token table.
    """

    val_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """Part of the text that is kept for validation.

    Lower it for a large text: a few thousand sequences are enough.
    """

    sharding: Literal["cursor", "modulo"] = "cursor"
    """`cursor` divides one global shuffled order among the ranks of the moment, so that training does not
    depend on their number; `modulo` is the textbook way: a rank sees only samples with `index % world_size ==
    rank`.

    Take `modulo` to compare with a `DistributedSampler`.
    """

    sentences: Annotated[int, Field(ge=100)] = 40_000
    """Sentences that the built-in grammar generates.

    Raise it for longer trainings of a larger model on the built-in text.
    """

    seed: Seed = defaults.SEED
    """Seed of the generated text, and of its division into training and validation.

    Change it to see how much a result depends on chance.
    """

    cache_dir: Path | None = None
    """Where encoded texts are kept; unset, in the user's cache folder.

    Set it when the home folder is small or on a network.
    """

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
    """Steps of the training; each updates the weights once.

    Raise it as long as the validation loss still falls.
    """

    epochs: Positive | None = None
    """Passes over the samples of an epoch, in place of a number of steps.

    Set it in a session that knows its dataset's length.
    """

    epoch_samples: Positive | None = None
    """Samples of an epoch.

    A session sets it to the length of its dataset.
    """

    global_batch: Positive = 16
    """Samples of a step, of all ranks together; with weak scaling of each rank.

    Raise it when ranks compute for too short a time between exchanges; the learning rate follows.
    """

    micro_batch: Positive | None = None
    """Samples that a rank computes at once; unset, chosen so that all ranks get equal work.

    Lower it when a rank runs out of memory.
    """

    scaling: Literal["strong", "weak"] = "strong"
    """`strong` keeps the global batch when ranks are added; `weak` keeps the batch of each rank.

    Take `weak` when a rank would get too few samples.
    """

    count_varies: bool = False
    """Whether the number of terms in the loss of a sample differs between samples, as that of tokens in
    padded texts.

    Set it in a session whose loss is a mean over such terms.
    """

    unused_parameters: bool = False
    """Whether a step may leave parameters without a gradient on some ranks or on all: parts that are frozen
    for a while, losses that use one branch. Gradients are then exchanged after backward.

    Set it in a session whose loss does not reach every parameter in every step.
    """

    checkpoint_every: Positive = 50
    """Steps between two checkpoints.

    Lower it on machines that fail often; `shoal simulate` finds the best.
    """

    keep_checkpoints: Positive = 3
    """Checkpoints that are kept; older ones are deleted.

    Lower it when the disk is small.
    """

    gc_every: Positive = 100
    """Steps between two runs of Python's garbage collector, which is off otherwise: ranks that collect at
    different times wait for each other.

    Lower it when memory grows during a run.
    """

    seed: Seed = defaults.SEED
    """Seed of the first weights, of dropout, and of the order of the samples.

    Change it to see how much a result depends on chance.
    """

    device: Device = "auto"
    """Where ranks compute: `cuda`, `cpu`, or `auto` for a GPU where there is one.

    Set `cpu` to leave the GPU to others.
    """

    profile_steps: Annotated[str, Field(pattern=r"^[1-9]\d{0,8}(-[1-9]\d{0,8})?$")] | None = None
    """Steps that torch.profiler records on every rank, such as `20-22`; `shoal trace` shows them.

    Set it to see which operations of a slow step take the time.
    """

    pin: Literal["auto", "on", "off"] = "auto"
    """Whether every rank keeps cores of its own; `auto` where ranks could disturb each other and there are
    enough cores, and if a trial in the first steps confirms that it is faster.

    Turn it off when other programs need those cores.
    """

    @field_validator("profile_steps")
    @classmethod
    def _check_profile_steps(cls, value: str | None) -> str | None:
        first, _, last = (value or "").partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"the last step of {value} comes before the first")
        return value


class TrainConfig(LoopConfig):
    """The optimisation of the GPT. A sample is a sequence of `model.seq_len` tokens."""

    lr: Annotated[float, Field(gt=0)] = 2e-3
    """The highest learning rate of AdamW. It belongs to `train.base_batch`, and scales linearly with the real
    global batch.

    Lower it when the loss jumps or becomes NaN.
    """

    base_batch: Positive = 16
    """The global batch that `train.lr` belongs to.

    Change it together with the learning rate.
    """

    warmup_steps: NotNegative = 10
    """Steps in which the learning rate rises from zero.

    Raise it for a large batch or model.
    """

    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last step, as a part of the highest.

    Lower it to 0 for a last bit of loss.
    """

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of AdamW, for matrices only.

    Lower it when a small model cannot learn its text.
    """

    beta1: Fraction = 0.9
    """Momentum of AdamW.

    Leave it.
    """

    beta2: Fraction = 0.99
    """Decay of the squared gradients in AdamW.

    Lower it to 0.95 for a large batch.
    """

    clip: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the gradients of a step; longer ones are shortened.

    Lower it when single batches make the loss jump.
    """

    eval_every: Positive = 50
    """Steps between two evaluations on the validation text.

    Raise it when evaluations take a visible part of the time.
    """

    eval_sequences: Positive = 120
    """Sequences of an evaluation.

    Raise it for a smoother validation loss.
    """

    compile: Literal["auto", "on", "off"] = "auto"
    """`auto` compiles the model's blocks where a trial on this machine shows that the run gains more than
    compiling takes; without a C++ compiler it is `off`.

    Turn it off to start sooner, on for a long run.
    """

    recompute: bool = False
    """Activation checkpointing: a block keeps only its inputs, and computes its forward again during backward. That
    takes less memory, and about a fifth more computing.

    Turn it on when activations are what does not fit; try a smaller micro-batch first.
    """

    precision: Literal["fp32", "bf16", "auto"] | None = None
    """Of matrix products: `bf16` is faster where the device has it and rounds to 8 bits; `auto` lets a trial
    choose. Unset: bf16 on a GPU that has it, fp32 elsewhere. On a GPU fp32 products are rounded to TF32.

    Set `fp32` to compare results between devices.
    """


class SyncConfig(Section):
    """How replicas agree; see docs/sync.md."""

    mode: str = "ddp"
    """How replicas agree: a method of docs/sync.md. `auto` starts with `ddp`, and its first steps choose
    between that, `diloco` and `streaming`, and the wire format unless it is given.

    Take `diloco` or `streaming` when ranks wait for the network; `auto` when you do not know.
    """

    wire: str = "fp32"
    """Number format of what is sent (docs/wires.md); for PowerSGD with its rank: `powersgd:8`.

    Take `bf16` or `int8` on a slow network.
    """

    accumulate: Positive = 1
    """Multiplies the batch, and so the work between two exchanges of gradients.

    Raise it when the network is slow and a larger batch does no harm.
    """

    every: Positive | None = None
    """Steps between two exchanges of parameters.

    Raise it when the network is what a run waits for.
    """

    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate of the outer optimizer of DiLoCo.

    Leave it, unless the loss jumps after each exchange.
    """

    outer_momentum: Fraction = 0.9
    """Nesterov momentum of the outer optimizer.

    Leave it.
    """

    fragments: Annotated[int, Field(ge=1, le=32)] = 4
    """Parts in which `streaming` exchanges the parameters.

    Raise it to send smaller parts more often.
    """

    overlap: Positive | None = None
    """Steps that an exchange of a fragment may take. Unset: five, or a fragment's turn where that is shorter.

    Raise it when ranks still wait.
    """

    measure: Literal["hook", "barrier", "off"] = "hook"
    """`hook` times every all-reduce inside DDP's overlap. `barrier` switches the overlap off and puts
    barriers around backward and all-reduce: exact figures, but a slower step. `off` times only the step as a
    whole.

    Take `barrier` to learn what an exchange costs without overlap.
    """

    bucket_mb: Annotated[float, Field(gt=0)] | None = None
    """Size of a bucket: smaller ones hide more of the exchange behind backward, but each costs a message.
    Unset: it follows the model's size.

    Change it when `shoal report` shows much exposed communication.
    """

    inside: Literal["auto", "gloo", "copies", "shared"] = "auto"
    """How ranks of one machine exchange gradients: `shared` keeps them in shared memory, `copies` copies the
    buckets of torch's own DDP through it; between machines one rank of each uses the network. `gloo` is TCP
    between all ranks. `auto` is `shared` where possible; on one machine `gloo` is tried too, in the first steps.

    Take `gloo` to measure what shared memory saves.
    """

    copies: Annotated[int, Field(ge=0, le=1)] | None = None
    """Copies of every part that `zero1`, `zero2` or `zero3` divides, beside the owner's: 1 keeps a second one on
    another machine, so that a lost machine loses no step. Unset: 1 with three or more ranks, otherwise 0.

    Take 0 when memory is short, and a return to the newest checkpoint after a loss does no harm.
    """

    units: str | None = None
    """Modules whose weights `zero3` gathers together, by their names in the model, with commas between them. Unset:
    the repeated blocks of the model.

    Name them when a model has no list of blocks, or too large ones.
    """

    planned: str | None = None
    """The choice that a plan expected of `auto`; written by `shoal train --plan`.

    Leave it.
    """

    planned_step_s: Annotated[float, Field(gt=0)] | None = None
    """The step time that a plan expected of `auto`; written by `shoal train --plan`.

    Leave it.
    """

    join_timeout_s: Annotated[float, Field(gt=0)] = defaults.JOIN_TIMEOUT_S
    """Seconds that ranks may take to form a process group.

    Raise it when slow machines take longer to import torch.
    """

    timeout_s: Annotated[float, Field(gt=0)] = defaults.SYNC_TIMEOUT_S
    """Seconds that a collective of a rank may take.

    Raise it when a healthy but slow peer is taken for dead.
    """

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
            raise ValueError(f"there is no such sync method: use {join_or(TRAIN_METHODS)}")
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
        if self.is_sharded and parse_wire(self.wire).format.is_low_rank:
            raise ValueError(
                f"sync.wire={self.wire} needs whole matrices, and {self.mode} divides them: use another wire"
            )
        if self.mode != "ddp" and self.measure == "barrier":
            raise ValueError("sync.measure=barrier takes the all-reduce out of DDP: it needs sync.mode=ddp")
        if self.mode == "auto" and self.measure != "hook":
            raise ValueError(
                f"sync.measure={self.measure} needs a fixed sync.mode: auto chooses by what the hook measures"
            )
        if (self.mode == "stock" or self.is_sharded) and self.inside in ("copies", "shared"):
            raise ValueError(f"sync.inside={self.inside} needs sync.mode=ddp: {self.mode} sends by gloo")
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
    def is_sharded(self) -> bool:
        """Whether the ranks divide moments, gradients or weights among them."""
        return self.shard_level > 0

    @property
    def shard_level(self) -> int:
        return SYNC_METHODS[self.mode].shard_level

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
    """The preset that the other settings started from; names the run.

    Give it as the first word of `shoal train`.
    """

    on: str = "local:2"
    """Where the ranks run: local:N, lab:N, a hosts file, or join:N (docs/hosts.md).

    Give it with `--on`.
    """

    launcher: Literal["shoal", "torchrun", "spawn"] = "shoal"
    """What starts the ranks: shoal's own agents, torchrun, or torch's spawn.

    Take another one to compare; only shoal's survives the loss of a machine.
    """

    threads: Positive | None = None
    """Threads of a rank. Unset: the node's cores divided by its ranks, or fewer if a trial in the first steps
    shows that these are faster.

    Lower it when other programs need cores.
    """

    weights: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(/\d+(\.\d+)?)*$")] | None = None
    """`1/1/0.5` gives a slow machine a smaller share of every batch, one number per rank; unset, all are
    equal at first. A hosts file sets it from the `weight` of its machines.

    Set it to fix the shares of machines whose speeds you know.
    """

    speeds: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(/\d+(\.\d+)?)*$")] | None = None
    """The speeds of the ranks in a profile of these machines (`shoal probe`), by which the first batches are
    divided. Shares follow what the ranks measure.

    shoal writes it, if there is such a profile; `weights` are for shares that stay.
    """

    balance: Literal["off", "static", "live"] | None = None
    """Whether shares follow the measured speed of the ranks. `off`: they stay as they were at the start;
    `static`: they are measured once, in the first steps; `live`: they follow. Unset: as `live`, once machines differ by
    more than 10%; but `weights` are kept, and so are the equal shares of ranks on one machine.

    Turn it off to compare runs step by step on the same shares.
    """

    devices: Annotated[str, Field(pattern=r"^(auto|cpu|cuda)(/(auto|cpu|cuda))*$")] | None = None
    """`cuda/cpu/cpu` gives each rank a device of its own; unset, all have `train.device`. Ranks without a GPU
    and ranks with one train together.

    Set it for machines of which only some have a GPU; their shares follow their speed.
    """

    lineage: Annotated[str, Field(pattern=r"^(\d+-\d+)?$")] = ""
    """Which lineage a resumed run continues, where its machines have two.

    Give it with `--lineage`, after a network partition.
    """


class MembersConfig(Section):
    """What happens when machines leave, fall silent or join; see docs/faults.md."""

    on_loss: Literal["go-on", "end"] = "go-on"
    """`go-on` continues with the members that are left; `end` ends the run, as torchrun without restarts
    does.

    Take `end` when a run must have all its machines.
    """

    on_silent_tie: Literal["continue", "pause"] = "continue"
    """What half of the machines do when they receive nothing from the other half: continue on their own, or
    pause.

    Take `pause` when two diverging trainings are worse than a pause.
    """

    min_nodes: Positive = defaults.MIN_NODES
    """With fewer nodes, training pauses.

    Raise it when training with few nodes is a waste of time.
    """

    max_nodes: Annotated[int, Field(ge=1, le=defaults.MAX_NODES)] = defaults.MAX_NODES
    """Further nodes must wait until one leaves.

    Lower it to limit who can join.
    """

    drop_slower_than: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A machine whose measured speed is less than this part of the fastest machine's is left out. It stays a
    spare, and comes back when another machine is lost. Unset: a machine that does not help is only named.

    Set it when some machines may be too slow to help.
    """

    silent_after_s: Annotated[float, Field(ge=1)] = defaults.SILENT_AFTER_S
    """Seconds without a heartbeat after which a member counts as silent.

    Raise it when busy machines or a bad Wi-Fi are taken for absent ones.
    """

    restarts: NotNegative = defaults.RESTARTS
    """How often an agent restarts a rank that was killed.

    Set 0 to see the first failure.
    """

    hung_tries: NotNegative = defaults.HUNG_TRIES
    """How many timeouts (`sync.timeout_s`) a rank that hangs may cause in a row before its agent kills and restarts
    it. When it then hangs again, the run ends. 0: it is named, and nothing else.

    Raise it when single steps of some ranks take minutes.
    """

    digest_every: Positive = 50
    """Steps between two comparisons of all replicas, bit by bit.

    Lower it when memory or cables may be broken.
    """

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

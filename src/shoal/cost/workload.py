"""What is to be trained, as far as its cost goes: how large the model is, and how much of it a step computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shoal.config.presets import HEAD_WIDTH
from shoal.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from shoal.cost.batch_plan import MICRO_BATCH_CAP, BatchPlan, deal, micro_batch, world_batch
from shoal.cost.buckets import BucketCost, GradientTensor, even_gradients, gradients
from shoal.cost.model_size import flops_per_token, parameter_count
from shoal.cost.network import ExchangeCost

GradientType = Literal["fp32", "bf16"]
GRADIENT_BYTES: dict[GradientType, int] = {"fp32": 4, "bf16": 2}

# What the tokenizer will find is known once it has read the text. Printable ASCII is 95 characters and the line's end.
_CHARACTERS = 96
_BYTES = 256
# The built-in corpus has so many different pieces and no more, however large a vocabulary is asked for.
_GRAMMAR_BPE = 1647
_GPT2_VOCABULARY = 50_257
# Of GPT-2's smallest model the embedding is 31%.
_VOCABULARY_PART = 0.3


@dataclass(frozen=True)
class Workload:
    """`model` is None where only the number of parameters is known. `gradient_bytes` is what an element of a gradient
    has where it is computed; the wire may have fewer. `train` holds batch, scaling and learning rate."""

    name: str
    parameters: int
    flops_per_token: float
    seq_len: int
    train: TrainConfig
    model: ModelConfig | None = None
    gradient_bytes: int = 4

    @cached_property
    def shape(self) -> ModelConfig:
        """The model's, or that of a GPT of its size."""
        return self.model or assumed_shape(self.parameters, self.seq_len)

    def sequences(self, world_size: int) -> int:
        return world_batch(self.train, world_size)

    def tokens(self, world_size: int) -> int:
        """Of one step of the whole world."""
        return self.seq_len * self.sequences(world_size)

    def gradients(self) -> list[GradientTensor]:
        return even_gradients(self.parameters) if self.model is None else gradients(self.model)

    def deal(self, weights: Sequence[float], most: int = MICRO_BATCH_CAP) -> BatchPlan:
        """In micro-batches of `most` sequences at most, where none are stated."""
        return deal(self.sequences(len(weights)), micro_batch(self.train, weights, most), weights)

    def with_batch(self, global_batch: int) -> Workload:
        return replace(self, train=self.train.model_copy(update={"global_batch": global_batch}))

    def accumulated(self, times: int) -> Workload:
        """So many times the work between two exchanges, and so many times the batch."""
        return self if times == 1 else self.with_batch(times * self.train.global_batch)


def workload_of(config: Config, gradient: GradientType = "fp32") -> Workload:
    """The vocabulary is the configured one, or what the tokenizer will probably come to."""
    size = config.model.vocab_size or assumed_vocabulary(config.data)
    model = config.model.model_copy(update={"vocab_size": size})
    return Workload(
        name=config.run.preset,
        parameters=parameter_count(model),
        flops_per_token=flops_per_token(model),
        seq_len=model.seq_len,
        train=config.train,
        model=model,
        gradient_bytes=GRADIENT_BYTES[gradient],
    )


def bare_workload(parameters: int, seq_len: int, train: TrainConfig, gradient: GradientType = "fp32") -> Workload:
    """A model of which only the size is known: six operations for each parameter and token."""
    return Workload(
        name=f"a model of {parameters:,} parameters",
        parameters=parameters,
        flops_per_token=6.0 * parameters,
        seq_len=seq_len,
        train=train,
        gradient_bytes=GRADIENT_BYTES[gradient],
    )


def assumed_vocabulary(data: DataConfig) -> int:
    match data.tokenizer:
        case "bpe":
            is_generated = data.path is None and data.builtin == "grammar"
            return min(data.bpe_vocab, _GRAMMAR_BPE) if is_generated else data.bpe_vocab
        case "byte":
            return _BYTES
        case "char":
            return _CHARACTERS


def assumed_shape(parameters: int, seq_len: int) -> ModelConfig:
    """A GPT of about this size on the one dial there is, depth: a head of 64 a layer. Its vocabulary is GPT-2's, or
    what a small model can afford."""
    embedding = _VOCABULARY_PART * parameters
    depth = _depth(parameters - min(embedding, _GPT2_VOCABULARY * HEAD_WIDTH * _depth(parameters)))
    width = HEAD_WIDTH * depth
    words = max(1, min(_GPT2_VOCABULARY, round(embedding / width)))
    return ModelConfig(layers=depth, heads=depth, width=width, seq_len=seq_len, vocab_size=words)


def _depth(in_blocks: float) -> int:
    return max(1, round(math.cbrt(in_blocks / (12 * HEAD_WIDTH**2))))


# SECTION cost/step
# The time of one step: computing, the exchange behind backward, and what of it shows.


# What a thread of the exchange gets of a core that another thread computes on.
_FAIR = 0.5


@dataclass(frozen=True)
class RankWork:
    """What one rank computes in a step. Times are of one micro-batch; `spare_cores` idle while it computes on
    `busy_cores`: the exchange takes those first. `spread` is how much its time varies from step to step: standard
    deviation, relative."""

    micro_batches: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float = 0.0
    busy_cores: float = 1.0
    spare_cores: float = 0.0
    spread: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.micro_batches * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class StepTime:
    """Of the rank that everybody waits for. `comm_s` is how long all exchanges would take by themselves, `exposed_s`
    how long the rank stands still for them or is slowed down by them; what adds up to `step_s` are the others. For
    `latency_s` of `comm_s` messages wait, however few bytes they have."""

    compute_s: float
    comm_s: float
    exposed_s: float
    wait_s: float
    optimizer_s: float
    other_s: float
    latency_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.wait_s + self.optimizer_s + self.other_s


def exposed_s(
    work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost], overlap: bool
) -> float:
    """How much later backward ends because of the exchange.

    One bucket after another, each as soon as it is ready and the one before is through, while backward goes on. Both
    want the same cores where none is spare: then each of them is slower.
    """
    costs = [exchange(bucket) for bucket in buckets]
    if not overlap:
        return sum(cost.seconds for cost in costs)
    now = computed = 0.0
    for bucket, cost in zip(buckets, costs, strict=True):
        ready = bucket.ready * work.backward_s
        if computed < ready:
            now += ready - computed
            computed = ready
        speed, slowed = _rates(work, cost)
        takes = cost.seconds / speed
        if slowed < 1 and computed + takes * slowed > work.backward_s:
            # Backward ends first; from then on the exchange has the cores to itself.
            together = (work.backward_s - computed) / slowed if slowed else 0.0
            takes = together + (cost.seconds - together * speed)
        computed = min(work.backward_s, computed + takes * slowed)
        now += takes
    return now + (work.backward_s - computed) - work.backward_s


def _rates(work: RankWork, cost: ExchangeCost) -> tuple[float, float]:
    """How fast the exchange and backward go on while both are under way, each against being alone."""
    missing = cost.cores - work.spare_cores
    if missing <= 0 or not cost.cores:
        return 1.0, 1.0
    granted = min(missing, _FAIR * work.busy_cores)
    return (work.spare_cores + granted) / cost.cores, 1 - granted / work.busy_cores

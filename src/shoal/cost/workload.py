"""What is trained, and the time of one step of one rank: computing, and the exchange behind backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shoal.config.presets import HEAD_WIDTH
from shoal.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from shoal.cost.batch_plan import MICRO_BATCH_CAP, BatchPlan, divide_batch, micro_batch, shares, world_batch
from shoal.cost.buckets import BucketCost, GradientTensor, even_gradients, gradients
from shoal.cost.model_size import activation_bytes, flops_per_token, parameter_count
from shoal.cost.network import ExchangeCost

GradientType = Literal["fp32", "bf16"]
GRADIENT_BYTES: dict[GradientType, int] = {"fp32": 4, "bf16": 2}

# The tokenizer's vocabulary is known once it has read the text. Printable ASCII is 95 characters and the line feed.
_CHARACTERS = 96
_BYTES = 256
# The built-in corpus has only this many different pieces, even for a larger `bpe_vocab`.
_GRAMMAR_BPE = 1647
_GPT2_VOCABULARY = 50_257
# The embedding is 31% of GPT-2's smallest model.
_VOCABULARY_FRACTION = 0.3
# What a thread of the exchange gets of a core on which another thread computes.
_FAIR_SHARE = 0.5


@dataclass(frozen=True)
class Workload:
    name: str
    parameters: int
    flops_per_token: float
    seq_len: int
    train: TrainConfig  # batch, scaling and learning rate
    model: ModelConfig | None = None  # None where only the number of parameters is known
    gradient_bytes: int = 4  # of an element where it is computed; the wire format may have fewer

    @cached_property
    def shape(self) -> ModelConfig:
        """The model, or a GPT of its size."""
        return self.model or assumed_shape(self.parameters, self.seq_len)

    def activation_bytes(self, micro_batch: int) -> float:
        return activation_bytes(self.shape, micro_batch, self.gradient_bytes, self.train.recompute)

    def recomputing(self) -> Workload:
        """Return the same training with activation checkpointing."""
        train = self.train.model_copy(update={"recompute": True})
        return replace(self, train=train, flops_per_token=flops_per_token(self.shape, recompute=True))

    def sequences(self, world_size: int) -> int:
        return world_batch(self.train, world_size)

    def tokens(self, world_size: int) -> int:
        """Return the tokens of one step of all ranks."""
        return self.seq_len * self.sequences(world_size)

    def gradients(self) -> list[GradientTensor]:
        return even_gradients(self.parameters) if self.model is None else gradients(self.model)

    def divide_batch(
        self, weights: Sequence[float], most: int = MICRO_BATCH_CAP, follows_speed: bool = False
    ) -> BatchPlan:
        """Divide a batch by weight, in micro-batches of at most `most` sequences unless their size is configured.

        Shares that follow speed are not whole micro-batches then (see `engine.balance`).
        """
        if follows_speed and self.train.micro_batch is None:
            size = micro_batch(self.train, (1.0,) * len(weights), most)
            return BatchPlan(size, shares(self.sequences(len(weights)), weights))
        return divide_batch(self.sequences(len(weights)), micro_batch(self.train, weights, most), weights)

    def with_batch(self, global_batch: int) -> Workload:
        return replace(self, train=self.train.model_copy(update={"global_batch": global_batch}))

    def accumulated(self, times: int) -> Workload:
        """Multiply the work between two exchanges, and the batch."""
        return self if times == 1 else self.with_batch(times * self.train.global_batch)


def workload_of(config: Config, gradient: GradientType = "fp32") -> Workload:
    """Return the workload of a run; without a configured vocabulary, assume what the tokenizer will probably find."""
    size = config.model.vocab_size or assumed_vocabulary(config.data)
    model = config.model.model_copy(update={"vocab_size": size})
    return Workload(
        name=config.run.preset,
        parameters=parameter_count(model),
        flops_per_token=flops_per_token(model, config.train.recompute),
        seq_len=model.seq_len,
        train=config.train,
        model=model,
        gradient_bytes=GRADIENT_BYTES[gradient],
    )


def bare_workload(parameters: int, seq_len: int, train: TrainConfig, gradient: GradientType = "fp32") -> Workload:
    """Return a model of which only the size is known: six operations per parameter and token."""
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
    """Return a GPT of about this size: a head of 64 per layer, and GPT-2's vocabulary or what a small model can
    afford."""
    embedding = _VOCABULARY_FRACTION * parameters

    def depth_for(block_parameters: float) -> int:
        return max(1, round(math.cbrt(block_parameters / (12 * HEAD_WIDTH**2))))

    depth = depth_for(parameters - min(embedding, _GPT2_VOCABULARY * HEAD_WIDTH * depth_for(parameters)))
    width = HEAD_WIDTH * depth
    vocabulary = max(1, min(_GPT2_VOCABULARY, round(embedding / width)))
    return ModelConfig(layers=depth, heads=depth, width=width, seq_len=seq_len, vocab_size=vocabulary)


# The time of one step


@dataclass(frozen=True)
class RankWork:
    """What one rank computes in a step."""

    micro_batches: int
    forward_s: float  # of one micro-batch
    backward_s: float  # of one micro-batch
    optimizer_s: float
    other_s: float = 0.0
    busy_cores: float = 1.0  # on which it computes
    spare_cores: float = 0.0  # idle meanwhile; the exchange uses them first
    spread: float = 0.0  # standard deviation of its time, relative

    @property
    def compute_s(self) -> float:
        return self.micro_batches * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class StepTime:
    """The step of the slowest rank. All fields but `comm_s` and `latency_s` add up to `step_s`."""

    compute_s: float
    comm_s: float  # of all exchanges by themselves
    exposed_s: float  # for which the rank waits for exchanges or is slowed down by them
    wait_s: float
    optimizer_s: float
    other_s: float
    latency_s: float = 0.0  # the part of `comm_s` that does not depend on the bytes

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.wait_s + self.optimizer_s + self.other_s


def exposed_s(
    work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost], overlap: bool
) -> float:
    """Return how much later backward ends because of the exchange.

    Buckets are exchanged one after another, each as soon as it is ready, while backward continues. Where no core is
    spare, both compete for the same cores and slow each other down.
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
            # Backward ends first; from then on the exchange has all cores.
            together = (work.backward_s - computed) / slowed if slowed else 0.0
            takes = together + (cost.seconds - together * speed)
        computed = min(work.backward_s, computed + takes * slowed)
        now += takes
    return now + (work.backward_s - computed) - work.backward_s


def _rates(work: RankWork, cost: ExchangeCost) -> tuple[float, float]:
    """Return the speeds of the exchange and of backward while both run, relative to each alone."""
    missing = cost.cores - work.spare_cores
    if missing <= 0 or not cost.cores:
        return 1.0, 1.0
    granted = min(missing, _FAIR_SHARE * work.busy_cores)
    return (work.spare_cores + granted) / cost.cores, 1 - granted / work.busy_cores

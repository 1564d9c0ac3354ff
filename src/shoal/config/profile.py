"""A measured cluster: what `shoal probe` writes and `shoal plan` reads.

Rates are payload: `gbps` is 10⁹ bits per second between two programs, without headers. The bytes of a collective are
those of the whole buffer, as in nccl-tests: for an all-gather what each rank has at the end.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from shoal.config.schema import ModelConfig, Positive, Section

VERSION = 1

# The shape of the `grammar` preset, whose speed users know from the demo.
SMALL_GPT = ModelConfig(vocab_size=2048)
# Products as large as a real model's, at a fraction of its time: the base for estimates of larger models.
WIDE_GPT = ModelConfig(layers=1, heads=12, width=768, seq_len=128, vocab_size=4096)


def _round_to_six_digits(value: float) -> float:
    """Keep the file readable; no measurement has more digits."""
    return float(f"{value:.6g}")


Above = Annotated[float, Field(gt=0), AfterValidator(_round_to_six_digits)]
AtLeastZero = Annotated[float, Field(ge=0), AfterValidator(_round_to_six_digits)]
Op = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"]
# Between processors: gloo. Between GPUs: NCCL (RCCL on AMD), or gloo on copies in pinned memory.
Backend = Literal["gloo", "nccl", "staged"]
DeviceKind = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
Bound = Literal["arithmetic", "memory", "overhead"]


class TrainingPoint(Section):
    """Forward, backward and optimizer step of the small GPT."""

    threads: Positive
    tokens_per_s: Above
    gflops: Above


class ModelTiming(Section):
    """One rank of a run *while all other ranks compute too*."""

    name: str
    model: ModelConfig
    threads: Positive
    micro_batch: Positive
    forward_s: Above  # of one micro-batch
    backward_s: Above  # of one micro-batch
    optimizer_s: Above
    spread: AtLeastZero  # standard deviation of the time, relative
    device: DeviceKind = "cpu"
    precision: Precision = "fp32"  # of matrix products; fp32 is TF32 on a GPU that has it

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.model.seq_len


class ComputeProfile(Section):
    """Peaks with `threads` threads, and training of the small GPT."""

    threads: Positive
    fp32_gflops: Above
    bf16_gflops: Above
    memory_gbytes_per_s: Above  # of a copy; bytes read and bytes written both count
    parameters: Positive
    tokens_per_step: Positive
    intensity: Above  # operations of the small GPT per byte it moves, by counting
    training: tuple[TrainingPoint, ...] = Field(min_length=1)
    bound: Bound  # the roof that limits its best point, or `overhead` where it is far below both

    @property
    def best(self) -> TrainingPoint:
        return max(self.training, key=lambda point: point.tokens_per_s)


class GpuProfile(Section):
    """One card. Rates are medians between two events in its queue."""

    name: str
    runtime: str  # of torch's build: `CUDA 13.0` or `ROCm 7.2`
    memory_bytes: Positive
    bf16_tflops: Above | None = None  # None where it has no instructions for it
    tf32_tflops: Above  # of fp32 matrices, rounded where the card can; others multiply fp32
    fp32_tflops: Above
    memory_gbytes_per_s: Above  # of a copy on the card; bytes read and bytes written both count
    # Between the processor's memory and the card: from pinned pages, as a training copies, and from others.
    to_gpu_gbytes_per_s: Above
    from_gpu_gbytes_per_s: Above
    to_gpu_pageable_gbytes_per_s: Above
    from_gpu_pageable_gbytes_per_s: Above

    @property
    def staging_s_per_byte(self) -> float:
        """The time to copy a byte of gradients to pinned memory, and its sum back."""
        return 1e-9 / self.from_gpu_gbytes_per_s + 1e-9 / self.to_gpu_gbytes_per_s


class NodeProfile(Section):
    name: str
    address: str
    interface: str | None = None
    ranks: Positive
    cores: Positive
    memory_bytes: Positive
    has_own_memory: bool = False  # a limit of its own, as a node of a lab can have: other nodes do not share it
    cpu: str
    arch: str
    os: str
    machine: str  # equal for nodes that are one machine: they share its cores, memory and speed
    versions: dict[str, str]
    compute: ComputeProfile
    timings: tuple[ModelTiming, ...] = ()
    fp16_s_per_parameter: Above | None = None  # to encode a gradient as fp16, and decode the sum
    gpus: tuple[GpuProfile, ...] = ()  # those that its ranks can use
    other_programs_cores: AtLeastZero | None = None  # cores that programs other than the probe kept busy


class LinkProfile(Section):
    """One direction. A machine's loopback has itself as source and target."""

    source: str
    target: str
    tool: Literal["shoal"]
    latency_s: Above  # round trip of a small message
    gbps: Above  # one stream
    gbps_4_streams: Above
    together_gbps: Above | None = None  # four streams while every link of the ring is used at once

    @property
    def together_ratio(self) -> float | None:
        """Near 1 where the links share nothing."""
        return None if self.together_gbps is None else self.together_gbps / self.gbps_4_streams


class CollectivePoint(Section):
    bytes: Positive
    seconds: Above
    algorithm_gbps: Above
    bus_gbps: Above
    rounds: Positive


class HeldOut(Section):
    """A size that was not used for the fit, and shows its error."""

    bytes: Positive
    measured_s: Above
    predicted_s: Above

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def operation_label(op: Op, element_bytes: int, backend: Backend = "gloo") -> str:
    number = "" if element_bytes == 4 else " in fp16"
    return op + number + {"gloo": "", "nccl": " by NCCL", "staged": " of GPU memory by gloo"}[backend]


class CollectiveProfile(Section):
    """The time of a collective over `world_size` ranks is `alpha_s + beta_s_per_byte · bytes`."""

    op: Op
    element_bytes: Positive = 4  # 4 for fp32, 2 for fp16, which gloo adds up by another path
    world_size: Annotated[int, Field(ge=2)]
    alpha_s: AtLeastZero
    beta_s_per_byte: AtLeastZero
    fit_error: AtLeastZero  # median relative error over the points
    cores: AtLeastZero = 0.0  # that a rank kept busy meanwhile
    points: tuple[CollectivePoint, ...] = Field(min_length=1)
    held_out: HeldOut | None = None
    backend: Backend = "gloo"

    @property
    def label(self) -> str:
        return operation_label(self.op, self.element_bytes, self.backend)

    def seconds(self, buffer_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * buffer_bytes


class ConnectionTrial(Section):
    connections: Positive  # parallel gloo connections
    seconds: Above  # of four all-reduces at once


class ProfileSummary(Section):
    """None where there is only one rank."""

    wire_gbps: Above | None = None  # the slowest link of the ring while all of it is used
    bus_gbps: Above | None = None  # of the largest all-reduce
    stack_efficiency: Above | None = None  # the ratio of both
    connections: Positive | None = None
    nodes: Positive


class Calibration(Section):
    """Factors on predicted times, and seconds of a step outside all phases, learned from past runs."""

    runs: Positive
    compute: Above = 1.0
    optimizer: Above = 1.0
    comm: Above = 1.0
    other_s: AtLeastZero


class Profile(Section):
    shoal_profile: Literal[1] = 1
    created: str
    on: str
    world_size: Positive
    budget_s: Above
    took_s: Above
    notes: tuple[str, ...] = ()
    nodes: tuple[NodeProfile, ...] = Field(min_length=1)
    links: tuple[LinkProfile, ...] = ()
    collectives: tuple[CollectiveProfile, ...] = ()
    connections: tuple[ConnectionTrial, ...] = ()
    calibration: Calibration | None = None
    # Last in the file, so that a truncated file lacks it.
    summary: ProfileSummary

    def node(self, name: str) -> NodeProfile:
        return next(node for node in self.nodes if node.name == name)

    def link(self, source: str, target: str) -> LinkProfile | None:
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)

    def collective(self, op: Op, element_bytes: int = 4, backend: Backend = "gloo") -> CollectiveProfile | None:
        wanted = (op, element_bytes, backend)
        matching = (entry for entry in self.collectives if (entry.op, entry.element_bytes, entry.backend) == wanted)
        return next(matching, None)

    @model_validator(mode="after")
    def _check_consistency(self) -> Profile:
        names = [node.name for node in self.nodes]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"there are two nodes called {twice[0]}")
        if unknown := {end for link in self.links for end in (link.source, link.target)} - set(names):
            raise ValueError(f"a link goes to {min(unknown)}, which is no node")
        if self.world_size != sum(node.ranks for node in self.nodes):
            raise ValueError(f"world_size is {self.world_size}, but the nodes have other ranks")
        if self.summary.nodes != len(self.nodes):
            raise ValueError(f"there are {len(self.nodes)} nodes, but the summary has {self.summary.nodes}")
        if self.world_size > 1 and self.collective("all-reduce") is None:
            raise ValueError("the all-reduce is missing")
        return self

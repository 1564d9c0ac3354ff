"""A measured cluster: what `shoal probe` writes and `shoal plan` reads.

Rates are payload: `gbps` is 10⁹ bits a second of what a program sends and another receives, headers not counted.
Bytes of a collective are those of the whole buffer, as nccl-tests counts them: for an all-gather what each rank ends
up with.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from shoal.config.schema import ModelConfig, Positive, Section

VERSION = 1

# The shape of the `grammar` preset, whose speed people know from the demo.
SMALL_GPT = ModelConfig(vocab_size=2048)
# Products as large as a real model's, at a fraction of its time: what larger models than the small one are judged by.
WIDE_GPT = ModelConfig(layers=1, heads=12, width=768, seq_len=128, vocab_size=4096)


def _six_digits(value: float) -> float:
    """More than any measurement has; a file of them can be read."""
    return float(f"{value:.6g}")


Above = Annotated[float, Field(gt=0), AfterValidator(_six_digits)]
AtLeastZero = Annotated[float, Field(ge=0), AfterValidator(_six_digits)]
Op = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"]
Bound = Literal["arithmetic", "memory", "overhead"]


class TrainingPoint(Section):
    """The small GPT with so many threads: forward, backward and the optimizer's step."""

    threads: Positive
    tokens_per_s: Above
    gflops: Above


class ModelPace(Section):
    """One rank of a run with `threads` threads, *while all others compute too*: seconds of one micro-batch, and of the
    update after the last one. `spread` is the standard deviation of its time, relative to that."""

    name: str
    model: ModelConfig
    threads: Positive
    micro_batch: Positive
    forward_s: Above
    backward_s: Above
    optimizer_s: Above
    spread: AtLeastZero

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.model.seq_len


class ComputeProfile(Section):
    """Peaks with `threads` threads. Memory is a copy, bytes read and bytes written both counted.

    `intensity` is the small GPT's arithmetic for each byte it moves, by counting; `bound` is which roof its best point
    is under, or `overhead` where it is far below both."""

    threads: Positive
    fp32_gflops: Above
    bf16_gflops: Above
    memory_gbytes_per_s: Above
    parameters: Positive
    tokens_per_step: Positive
    intensity: Above
    training: tuple[TrainingPoint, ...] = Field(min_length=1)
    bound: Bound

    @property
    def best(self) -> TrainingPoint:
        return max(self.training, key=lambda point: point.tokens_per_s)


class NodeProfile(Section):
    """`machine` is the same for nodes that are one machine: they share its cores, memory and speed.
    `fp16_s_per_parameter` is what a rank takes to send a gradient as fp16: making halves, and floats of their sum.
    `other_programs_cores` is how many cores of the machine programs beside the probe kept busy."""

    name: str
    address: str
    interface: str | None = None
    ranks: Positive
    cores: Positive
    memory_bytes: Positive
    cpu: str
    arch: str
    os: str
    machine: str
    versions: dict[str, str]
    compute: ComputeProfile
    paces: tuple[ModelPace, ...] = ()
    fp16_s_per_parameter: Above | None = None
    other_programs_cores: AtLeastZero | None = None


class LinkProfile(Section):
    """One direction. `latency_s` is the round trip of a small message; `gbps` is one stream, `together_gbps` four
    streams while every link of the ring is used at once. A machine's loopback has itself as source and target."""

    source: str
    target: str
    tool: Literal["iperf3", "shoal"]
    latency_s: Above
    gbps: Above
    gbps_4_streams: Above
    together_gbps: Above | None = None

    @property
    def together_ratio(self) -> float | None:
        """Near 1 where the links do not share anything."""
        return None if self.together_gbps is None else self.together_gbps / self.gbps_4_streams


class CollectivePoint(Section):
    bytes: Positive
    seconds: Above
    algorithm_gbps: Above
    bus_gbps: Above
    rounds: Positive


class HeldOut(Section):
    """A size that the fit has not seen: how far to trust it."""

    bytes: Positive
    measured_s: Above
    predicted_s: Above

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def operation_label(op: Op, element_bytes: int) -> str:
    return op if element_bytes == 4 else f"{op} in fp16"


class CollectiveProfile(Section):
    """`alpha_s + beta_s_per_byte · bytes` is the time of one such operation over `world_size` ranks; `fit_error` is the
    median relative error of that over the points. `element_bytes` is 4 for fp32, 2 for fp16, which gloo adds up by
    other means; `cores` is how many a rank kept busy meanwhile."""

    op: Op
    element_bytes: Positive = 4
    world_size: Annotated[int, Field(ge=2)]
    alpha_s: AtLeastZero
    beta_s_per_byte: AtLeastZero
    fit_error: AtLeastZero
    cores: AtLeastZero = 0.0
    points: tuple[CollectivePoint, ...] = Field(min_length=1)
    held_out: HeldOut | None = None

    @property
    def label(self) -> str:
        """Two of them may be the same operation."""
        return operation_label(self.op, self.element_bytes)

    def seconds(self, buffer_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * buffer_bytes


class ConnectionTrial(Section):
    """`seconds` for four all-reduces at once over so many parallel gloo connections."""

    connections: Positive
    seconds: Above


class ProfileSummary(Section):
    """`wire_gbps` is the slowest link of the ring while all of it is used, `bus_gbps` what the largest all-reduce made
    of it; their ratio is the stack's efficiency. None where there is but one rank."""

    wire_gbps: Above | None = None
    bus_gbps: Above | None = None
    stack_efficiency: Above | None = None
    connections: Positive | None = None
    nodes: Positive


class Calibration(Section):
    """What past runs taught: factors on predicted times, and seconds of a step that no phase accounts for."""

    runs: Positive
    compute: Above = 1.0
    optimizer: Above = 1.0
    comm: Above = 1.0
    other_s: AtLeastZero


class Profile(Section):
    """`summary` stands last in the file, so that one that was cut off is known by its absence."""

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
    summary: ProfileSummary

    def node(self, name: str) -> NodeProfile:
        return next(node for node in self.nodes if node.name == name)

    def link(self, source: str, target: str) -> LinkProfile | None:
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)

    def collective(self, op: Op, element_bytes: int = 4) -> CollectiveProfile | None:
        found = (entry for entry in self.collectives if (entry.op, entry.element_bytes) == (op, element_bytes))
        return next(found, None)

    @model_validator(mode="after")
    def _hangs_together(self) -> Profile:
        names = [node.name for node in self.nodes]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"there are two nodes called {twice[0]}")
        if strangers := {end for link in self.links for end in (link.source, link.target)} - set(names):
            raise ValueError(f"a link goes to {min(strangers)}, which is no node")
        if self.world_size != sum(node.ranks for node in self.nodes):
            raise ValueError(f"world_size is {self.world_size}, but the nodes have other ranks")
        if self.summary.nodes != len(self.nodes):
            raise ValueError(f"{len(self.nodes)} nodes are there, and the summary speaks of {self.summary.nodes}")
        if self.world_size > 1 and self.collective("all-reduce") is None:
            raise ValueError("the all-reduce is missing")
        return self

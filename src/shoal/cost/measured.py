"""Speed and network models from a measured profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.config.profile import SMALL_GPT, Backend, Calibration, DeviceKind, ModelTiming, NodeProfile, Profile
from shoal.config.schema import ModelConfig
from shoal.cost.model_size import flops_per_token, parameter_count
from shoal.cost.network import LinearFit, MeasuredNetwork, Network, NoNetwork
from shoal.cost.predict import ClusterModel
from shoal.cost.strategy import SyncStrategy, cpu_encode_s
from shoal.cost.workload import RankWork, Workload
from shoal.errors import ConfigError

# Before a calibration: fetching the batch and recording the step, measured on small models, where they matter.
NOTHING_LEARNED = Calibration(runs=1, other_s=0.002)

# (sequences of a micro-batch, seconds), in ascending order.
Times = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ModelSpeed:
    """One model on one rank."""

    forward: Times
    backward: Times
    optimizer_s: float
    spread: float
    threads: int
    is_measured: bool  # this model was measured, not only others like it

    def recomputing(self) -> ModelSpeed:
        """Return the speed with activation checkpointing: backward begins with another forward."""
        backward = tuple((size, seconds + interpolate(self.forward, size)) for size, seconds in self.backward)
        return replace(self, backward=backward)

    def slower(self, factor: float) -> ModelSpeed:
        def scaled(times: Times) -> Times:
            return tuple((size, factor * seconds) for size, seconds in times)

        return replace(
            self,
            forward=scaled(self.forward),
            backward=scaled(self.backward),
            optimizer_s=factor * self.optimizer_s,
        )


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed of a profile's nodes. Ranks count through the nodes in order; more ranks are like the last node's."""

    profile: Profile
    world_size: int  # ranks that take part: fewer of them on one machine disturb each other less
    devices: tuple[DeviceKind, ...] = ("cpu",)  # of the ranks; further ranks are like the last one

    def device(self, rank: int) -> DeviceKind:
        return self.devices[min(rank, len(self.devices) - 1)]

    def in_world(self, world_size: int) -> MeasuredSpeed:
        return replace(self, world_size=world_size)

    def node(self, rank: int) -> NodeProfile:
        ranks = [node for node in self.profile.nodes for _ in range(node.ranks)]
        return ranks[min(rank, len(ranks) - 1)]

    def model_speed(self, model: ModelConfig, rank: int, precision: str | None = None) -> ModelSpeed:
        node = self.node(rank)
        if self.device(rank) == "cuda":
            # Ranks that share a GPU take turns on it. All ranks of the node were timed together.
            slower = self._ranks_per_gpu(node, self.world_size) / self._ranks_per_gpu(node, node.ranks)
            return model_speed_of(_gpu_timings(node, precision), model).slower(slower)
        all_contention, neighbours = contention(self.profile, node), len(_nodes_of_machine(self.profile, node))
        used = min(neighbours, max(1, math.ceil(self.world_size / node.ranks)))
        # Between alone and all nodes of the machine, in proportion to those that take part.
        now_contention = 1 + (all_contention - 1) * (used - 1) / (neighbours - 1) if neighbours > 1 else 1.0
        return model_speed_of(_cpu_timings(node), model).slower(now_contention / all_contention)

    def _ranks_per_gpu(self, node: NodeProfile, ranks: int) -> int:
        return math.ceil(min(ranks, node.ranks) / len(node.gpus))

    @property
    def learned(self) -> Calibration:
        return self.profile.calibration or NOTHING_LEARNED

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        speed = self.model_speed(workload.shape, rank, workload.train.precision)
        speed = speed.recomputing() if workload.train.recompute else speed
        # A GPU needs no core for computing, so that an exchange slows nothing down.
        is_gpu, node = self.device(rank) == "cuda", self.node(rank)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=self.learned.compute * interpolate(speed.forward, micro_batch),
            backward_s=self.learned.compute * interpolate(speed.backward, micro_batch),
            optimizer_s=self.learned.optimizer * speed.optimizer_s,
            other_s=self.learned.other_s,
            busy_cores=1.0 if is_gpu else float(speed.threads),
            spare_cores=float(node.cores) if is_gpu else spare_cores(self.profile, node),
            spread=speed.spread,
        )

    def encode_s(self, strategy: SyncStrategy, rank: int, parameters: int) -> float:
        node = self.node(rank)
        if gpu_backend(self.profile, self.devices) == "nccl":
            return 1e-9 * strategy.format.memory_bytes * parameters / node.gpus[0].memory_gbytes_per_s
        if strategy.format.number_bytes == 2 and node.fp16_s_per_parameter:
            return node.fp16_s_per_parameter * parameters
        return cpu_encode_s(strategy, parameters, _cpu_timings(node)[0].threads)

    def memory_bytes(self, rank: int) -> float:
        node = self.node(rank)
        if self.device(rank) == "cuda":
            return node.gpus[0].memory_bytes / self._ranks_per_gpu(node, self.world_size)
        sharing = [node] if node.has_own_memory else _nodes_of_machine(self.profile, node)
        return node.memory_bytes / sum(other.ranks for other in sharing)


@dataclass(frozen=True)
class ScriptSpeed:
    """The speed of a user's script: its seconds per sample on the first node, and other nodes by the profile's models.

    Times grow in proportion to the samples: what a script costs beside them is unknown.
    """

    profile: MeasuredSpeed
    forward_s: float  # of one sample
    backward_s: float  # of one sample
    optimizer_s: float
    other_s: float

    def in_world(self, world_size: int) -> ScriptSpeed:
        return replace(self, profile=self.profile.in_world(world_size))

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        # One rank alone was measured. The profile knows how much slower this one is, next to the others.
        alone, here = self.profile.in_world(1).model_speed(SMALL_GPT, 0), self.profile.model_speed(SMALL_GPT, rank)
        slower = interpolate(here.backward, 1) / interpolate(alone.backward, 1)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=slower * self.forward_s * micro_batch,
            backward_s=slower * self.backward_s * micro_batch,
            optimizer_s=slower * self.optimizer_s,
            other_s=slower * self.other_s,
            busy_cores=float(here.threads),
            spare_cores=spare_cores(self.profile.profile, self.profile.node(rank)),
            spread=here.spread,
        )

    def encode_s(self, strategy: SyncStrategy, rank: int, parameters: int) -> float:
        return self.profile.encode_s(strategy, rank, parameters)

    def memory_bytes(self, rank: int) -> float:
        return self.profile.memory_bytes(rank)


def rank_devices(profile: Profile, wanted: Callable[[int], str]) -> tuple[DeviceKind, ...]:
    """Return where each rank computes, by the rule of a run: `auto` is a GPU for every rank of a node, or none.

    `wanted` returns what is configured for a rank: `auto`, `cpu` or `cuda`.
    """
    devices: list[DeviceKind] = []
    for node in profile.nodes:
        gpus = len(node.gpus) if any(timing.device == "cuda" for timing in node.timings) else 0
        for rank in range(len(devices), len(devices) + node.ranks):
            choice = wanted(rank)
            if choice == "cuda" and not gpus:
                raise ConfigError(
                    f"rank {rank} on {node.name} is to use a GPU, and the profile has none of that node",
                    why="torch found none there when it was measured, or an older shoal measured it",
                    fix=f"find out why: shoal doctor --on {profile.on}\nmeasure again: shoal probe --on {profile.on}",
                )
            is_gpu = choice == "cuda" or (choice == "auto" and gpus >= node.ranks)
            devices.append("cuda" if is_gpu else "cpu")
    return tuple(devices)


def gpu_backend(profile: Profile, devices: Sequence[DeviceKind]) -> Backend:
    """Return how ranks on these devices exchange gradients: NCCL needs a GPU for each."""
    if "cuda" not in devices:
        return "gloo"
    has_nccl = "cpu" not in devices and profile.collective("all-reduce", backend="nccl") is not None
    return "nccl" if has_nccl else "staged"


def staging_s_per_byte(profile: Profile, devices: Sequence[DeviceKind]) -> float:
    """Return the time to copy a byte of gradients from a GPU to pinned memory and back, where gloo exchanges it."""
    if gpu_backend(profile, devices) != "staged":
        return 0.0
    staged, plain = (profile.collective("all-reduce", backend=backend) for backend in ("staged", "gloo"))
    if staged is not None and plain is not None:
        return max(0.0, staged.beta_s_per_byte - plain.beta_s_per_byte)
    return max(gpu.staging_s_per_byte for node in profile.nodes for gpu in node.gpus)


def cluster_model_of(profile: Profile, devices: tuple[DeviceKind, ...] = ("cpu",)) -> ClusterModel:
    if not all(_cpu_timings(node) for node in profile.nodes):
        raise ConfigError(
            "the profile does not contain how fast a model trains on these machines",
            why="an older shoal measured it",
            fix=f"measure them again: shoal probe --on {profile.on}",
        )
    names = tuple(node.name for node in profile.nodes)
    return ClusterModel(
        MeasuredSpeed(profile, profile.world_size, devices),
        measured_network(profile, "nccl" if gpu_backend(profile, devices) == "nccl" else "gloo"),
        node_names=names,
        staging_s_per_byte=staging_s_per_byte(profile, devices),
    )


def measured_network(profile: Profile, backend: Backend = "gloo") -> Network:
    collectives = {size: profile.collective("all-reduce", size, backend) for size in (4, 2)}
    entries = {size: entry for size, entry in collectives.items() if entry is not None}
    if not entries:
        return NoNetwork()
    learned = (profile.calibration or NOTHING_LEARNED).comm
    return MeasuredNetwork(
        world_size=entries[4].world_size,
        lines={
            size: LinearFit(learned * entry.alpha_s, learned * entry.beta_s_per_byte) for size, entry in entries.items()
        },
        cores={size: entry.cores for size, entry in entries.items()},
        link_factors=link_factors(profile) if backend == "gloo" else {},
    )


def link_factors(profile: Profile) -> dict[int, float]:
    """Return by number of ranks how much less a byte costs over the links of the first nodes than over all links.

    A number of ranks is missing where it needs all nodes, only one of them, or a link that was not measured.
    """
    gbps = {(link.source, link.target): link.gbps_4_streams for link in profile.links}
    names = [node.name for node in profile.nodes]

    def slowest(count: int) -> float | None:
        ring = zip(names[:count], [*names[1:count], names[0]], strict=True)
        rates = [gbps.get(pair) for pair in ring]
        return None if None in rates else min(rate for rate in rates if rate is not None)

    factors, ranks, of_all = {}, 0, slowest(len(names))
    for count, node in enumerate(profile.nodes[:-1], start=1):
        own = slowest(count) if count > 1 else None
        for rank_count in range(ranks + 1, ranks + node.ranks + 1):
            if own is not None and of_all is not None and own > of_all:
                factors[rank_count] = of_all / own
        ranks += node.ranks
    return factors


def spare_cores(profile: Profile, node: NodeProfile) -> float:
    """Return the cores that are free for a rank's exchange while all ranks of its machine compute."""
    neighbours = _nodes_of_machine(profile, node)
    ranks = sum(other.ranks for other in neighbours)
    computing = sum(other.ranks * _cpu_timings(other)[0].threads for other in neighbours)
    return max(0.0, max(other.cores for other in neighbours) - computing) / ranks


def contention(profile: Profile, node: NodeProfile) -> float:
    """Return how much slower its ranks are while all nodes of its machine compute: 1 where it is the only one."""
    speed = model_speed_of(_cpu_timings(node), SMALL_GPT)
    alone = next((point for point in node.compute.training if point.threads == speed.threads), None)
    if alone is None or len(_nodes_of_machine(profile, node)) == 1:
        return 1.0
    sequences = node.compute.tokens_per_step // SMALL_GPT.seq_len
    together_s = interpolate(speed.forward, sequences) + interpolate(speed.backward, sequences) + speed.optimizer_s
    return max(1.0, together_s * alone.tokens_per_s / node.compute.tokens_per_step)


def _nodes_of_machine(profile: Profile, node: NodeProfile) -> list[NodeProfile]:
    return [other for other in profile.nodes if other.machine == node.machine]


def _cpu_timings(node: NodeProfile) -> list[ModelTiming]:
    return [timing for timing in node.timings if timing.device == "cpu"]


def _gpu_timings(node: NodeProfile, precision: str | None) -> list[ModelTiming]:
    """Return the times on the node's GPUs in this precision; by default in bf16, where they have it."""
    on_gpu = [timing for timing in node.timings if timing.device == "cuda"]
    wanted = "fp32" if precision == "fp32" else "bf16"
    return [timing for timing in on_gpu if timing.precision == wanted] or on_gpu


# The speed of a model


def model_speed_of(timings: Sequence[ModelTiming], model: ModelConfig) -> ModelSpeed:
    """Return the speed of `model`. A vocabulary of another size changes only the head: a tokenizer may find 65
    characters where 96 were expected."""

    def body(shape: ModelConfig) -> ModelConfig:
        return shape.model_copy(update={"dropout": 0.0, "vocab_size": 0})

    own = next((timing.name for timing in timings if body(timing.model) == body(model)), None)
    return _estimated(timings, model) if own is None else _scaled(timings, own, model)


def interpolate(times: Times, micro_batch: int) -> float:
    """Interpolate linearly between measured micro-batches; outside of them scale in proportion."""
    below = [entry for entry in times if entry[0] <= micro_batch]
    above = [entry for entry in times if entry[0] >= micro_batch]
    if not (below and above):
        size, seconds = below[-1] if below else above[0]
        return seconds * micro_batch / size
    (low, low_s), (high, high_s) = below[-1], above[0]
    return low_s if high == low else low_s + (high_s - low_s) * (micro_batch - low) / (high - low)


def _estimated(timings: Sequence[ModelTiming], model: ModelConfig) -> ModelSpeed:
    """Interpolate between the measured models that are nearest in width, each scaled by its arithmetic."""
    shapes = {timing.name: timing.model for timing in timings}
    ordered = sorted(shapes, key=lambda name: shapes[name].width)
    below = [name for name in ordered if shapes[name].width <= model.width] or ordered[:1]
    above = [name for name in ordered if shapes[name].width >= model.width] or ordered[-1:]
    low, high = (_scaled(timings, name, model) for name in (below[-1], above[0]))
    widths = shapes[below[-1]].width, shapes[above[0]].width
    weight = 0.0 if widths[0] == widths[1] else math.log(model.width / widths[0]) / math.log(widths[1] / widths[0])

    def mean(one: float, other: float) -> float:
        """Geometric, because speeds differ by factors."""
        return float(one ** (1 - weight) * other**weight)

    def blend(one: Times, other: Times) -> Times:
        sizes = sorted({size for size, _ in (*one, *other)})
        return tuple((size, mean(interpolate(one, size), interpolate(other, size))) for size in sizes)

    return ModelSpeed(
        forward=blend(low.forward, high.forward),
        backward=blend(low.backward, high.backward),
        optimizer_s=mean(low.optimizer_s, high.optimizer_s),
        spread=high.spread,
        threads=high.threads,
        is_measured=False,
    )


def _scaled(timings: Sequence[ModelTiming], name: str, model: ModelConfig) -> ModelSpeed:
    """Return the speed of `model` if it computed as fast as the measured model `name`; micro-batches with the same
    number of tokens are compared."""
    measured = sorted((timing for timing in timings if timing.name == name), key=lambda timing: timing.micro_batch)
    known, largest = measured[0].model, measured[-1]
    work = flops_per_token(model) / flops_per_token(known)

    def scaled(times: Times) -> Times:
        sizes = {max(1, round(size * known.seq_len / model.seq_len)) for size, _ in times}
        return tuple((size, work * interpolate(times, size * model.seq_len // known.seq_len)) for size in sorted(sizes))

    return ModelSpeed(
        forward=scaled(tuple((timing.micro_batch, timing.forward_s) for timing in measured)),
        backward=scaled(tuple((timing.micro_batch, timing.backward_s) for timing in measured)),
        optimizer_s=parameter_count(model) / parameter_count(known) * largest.optimizer_s,
        spread=largest.spread,
        threads=largest.threads,
        is_measured=True,
    )

"""From a measured profile to what the plan reckons with: how fast each rank computes, and how fast they exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.config.profile import SMALL_GPT, Calibration, ModelPace, NodeProfile, Profile
from shoal.config.schema import ModelConfig
from shoal.cost.buckets import Lever
from shoal.cost.machines import cpu_encode_s
from shoal.cost.model_size import flops_per_token, parameter_count
from shoal.cost.network import LinearFit, MeasuredNetwork, Network, NoNetwork
from shoal.cost.predict import ClusterModel
from shoal.cost.workload import RankWork, Workload
from shoal.errors import ConfigError

# Fetching the batch and writing the step down: measured on small models, where it shows.
NOTHING_LEARNED = Calibration(runs=1, other_s=0.002)

Times = tuple[tuple[int, float], ...]
"""Sequences of a micro-batch, seconds; in order."""


@dataclass(frozen=True)
class ModelSpeed:
    """One model on one rank. `is_measured`: this very model was, and not only others like it."""

    forward: Times
    backward: Times
    optimizer_s: float
    spread: float
    threads: int
    is_measured: bool

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
    """Ranks count through the profile's nodes in their order; behind the last one its like follow. `world_size` is how
    many of them take part: fewer nodes on one machine are in each other's way less."""

    profile: Profile
    world_size: int

    def in_world(self, world_size: int) -> MeasuredSpeed:
        return replace(self, world_size=world_size)

    def node(self, rank: int) -> NodeProfile:
        ranks = [node for node in self.profile.nodes for _ in range(node.ranks)]
        return ranks[min(rank, len(ranks) - 1)]

    def pace(self, model: ModelConfig, rank: int) -> ModelSpeed:
        node = self.node(rank)
        return pace_of(node.paces, model).slower(self._crowding(node) / crowding(self.profile, node))

    @property
    def learned(self) -> Calibration:
        return self.profile.calibration or NOTHING_LEARNED

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        pace = self.pace(workload.shape, rank)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=self.learned.compute * between(pace.forward, micro_batch),
            backward_s=self.learned.compute * between(pace.backward, micro_batch),
            optimizer_s=self.learned.optimizer * pace.optimizer_s,
            other_s=self.learned.other_s,
            busy_cores=float(pace.threads),
            spare_cores=spare_cores(self.profile, self.node(rank)),
            spread=pace.spread,
        )

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        node = self.node(rank)
        if lever.wire in ("fp16", "bf16") and node.fp16_s_per_parameter:
            return node.fp16_s_per_parameter * parameters
        return cpu_encode_s(lever, parameters, node.paces[0].threads)

    def memory_bytes(self, rank: int) -> float:
        node = self.node(rank)
        sharing = sum(each.ranks for each in self.profile.nodes if each.machine == node.machine)
        return node.memory_bytes / sharing

    def _crowding(self, node: NodeProfile) -> float:
        """Between alone and all of them, as many nodes of its machine as take part."""
        here = [each for each in self.profile.nodes if each.machine == node.machine]
        used = min(len(here), max(1, math.ceil(self.world_size / node.ranks)))
        if len(here) == 1:
            return 1.0
        return 1 + (crowding(self.profile, node) - 1) * (used - 1) / (len(here) - 1)


def setting_of(profile: Profile) -> ClusterModel:
    if not all(node.paces for node in profile.nodes):
        raise ConfigError(
            "the profile does not say how fast a model trains on these machines",
            why="an older shoal measured it",
            fix=f"measure them again: shoal probe --on {profile.on}",
        )
    names = tuple(node.name for node in profile.nodes)
    return ClusterModel(MeasuredSpeed(profile, profile.world_size), measured_network(profile), node_names=names)


def measured_network(profile: Profile) -> Network:
    found = {size: profile.collective("all-reduce", size) for size in (4, 2)}
    entries = {size: entry for size, entry in found.items() if entry is not None}
    if not entries:
        return NoNetwork()
    learned = (profile.calibration or NOTHING_LEARNED).comm
    return MeasuredNetwork(
        world_size=entries[4].world_size,
        lines={
            size: LinearFit(learned * entry.alpha_s, learned * entry.beta_s_per_byte) for size, entry in entries.items()
        },
        cores={size: entry.cores for size, entry in entries.items()},
    )


def pace_of(paces: Sequence[ModelPace], model: ModelConfig) -> ModelSpeed:
    """A vocabulary of another size is another head, and the same model otherwise: one tokenizer finds 65 characters
    where 96 were expected."""
    own = next((pace.name for pace in paces if _body(pace.model) == _body(model)), None)
    if own is None:
        return _estimated(paces, model)
    return replace(_scaled(paces, own, model), is_measured=True)


def between(times: Times, micro_batch: int) -> float:
    """Seconds for a micro-batch that was not measured: on the line between its neighbours, and beyond the largest in
    proportion, which is right for whatever is large."""
    below = [entry for entry in times if entry[0] <= micro_batch]
    above = [entry for entry in times if entry[0] >= micro_batch]
    if not (below and above):
        size, seconds = below[-1] if below else above[0]
        return seconds * micro_batch / size
    (low, low_s), (high, high_s) = below[-1], above[0]
    return low_s if high == low else low_s + (high_s - low_s) * (micro_batch - low) / (high - low)


def spare_cores(profile: Profile, node: NodeProfile) -> float:
    """Cores a rank's exchange can have to itself while all ranks of its machine compute."""
    here = [each for each in profile.nodes if each.machine == node.machine]
    ranks = sum(each.ranks for each in here)
    computing = sum(each.ranks * each.paces[0].threads for each in here)
    return max(0.0, max(each.cores for each in here) - computing) / ranks


def crowding(profile: Profile, node: NodeProfile) -> float:
    """How much slower its ranks are while all nodes of its machine compute: 1 where it has the machine to itself."""
    pace = pace_of(node.paces, SMALL_GPT)
    alone = next((point for point in node.compute.training if point.threads == pace.threads), None)
    if alone is None or sum(each.machine == node.machine for each in profile.nodes) == 1:
        return 1.0
    sequences = node.compute.tokens_per_step // SMALL_GPT.seq_len
    together_s = between(pace.forward, sequences) + between(pace.backward, sequences) + pace.optimizer_s
    return max(1.0, together_s * alone.tokens_per_s / node.compute.tokens_per_step)


def _body(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"dropout": 0.0, "vocab_size": 0})


def _measured(paces: Sequence[ModelPace]) -> ModelSpeed:
    ordered = sorted(paces, key=lambda pace: pace.micro_batch)
    return ModelSpeed(
        forward=tuple((pace.micro_batch, pace.forward_s) for pace in ordered),
        backward=tuple((pace.micro_batch, pace.backward_s) for pace in ordered),
        optimizer_s=ordered[-1].optimizer_s,
        spread=ordered[-1].spread,
        threads=ordered[-1].threads,
        is_measured=True,
    )


def _estimated(paces: Sequence[ModelPace], model: ModelConfig) -> ModelSpeed:
    """From the measured models that are nearest in width, each scaled by the arithmetic it does."""
    shapes = {pace.name: pace.model for pace in paces}
    ordered = sorted(shapes, key=lambda name: shapes[name].width)
    below = [name for name in ordered if shapes[name].width <= model.width] or ordered[:1]
    above = [name for name in ordered if shapes[name].width >= model.width] or ordered[-1:]
    low, high = (_scaled(paces, name, model) for name in (below[-1], above[0]))
    widths = shapes[below[-1]].width, shapes[above[0]].width
    part = 0.0 if widths[0] == widths[1] else math.log(model.width / widths[0]) / math.log(widths[1] / widths[0])
    return ModelSpeed(
        forward=_blend(low.forward, high.forward, part),
        backward=_blend(low.backward, high.backward, part),
        optimizer_s=_mean(low.optimizer_s, high.optimizer_s, part),
        spread=high.spread,
        threads=high.threads,
        is_measured=False,
    )


def _scaled(paces: Sequence[ModelPace], name: str, model: ModelConfig) -> ModelSpeed:
    """As if `model` computed at the speed of the one called `name`; a micro-batch of as many tokens stands for it."""
    own = [pace for pace in paces if pace.name == name]
    known, pace = own[0].model, _measured(own)
    work = flops_per_token(model) / flops_per_token(known)

    def scaled(times: Times) -> Times:
        sizes = {max(1, round(size * known.seq_len / model.seq_len)) for size, _ in times}
        return tuple((size, work * between(times, size * model.seq_len // known.seq_len)) for size in sorted(sizes))

    updates = parameter_count(model) / parameter_count(known)
    return replace(
        pace, forward=scaled(pace.forward), backward=scaled(pace.backward), optimizer_s=updates * pace.optimizer_s
    )


def _blend(one: Times, other: Times, part: float) -> Times:
    sizes = sorted({size for size, _ in (*one, *other)})
    return tuple((size, _mean(between(one, size), between(other, size), part)) for size in sizes)


def _mean(one: float, other: float, part: float) -> float:
    """Geometric: speeds differ by factors."""
    return float(one ** (1 - part) * other**part)

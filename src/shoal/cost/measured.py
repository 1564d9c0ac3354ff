"""From a measured profile to what the plan reckons with: how fast each rank computes, and how fast they exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.profile import SMALL_GPT, ModelPace, NodeProfile, Profile
from shoal.config.schema import ModelConfig
from shoal.cost.fit import Line, fit
from shoal.cost.network import MeasuredNetwork
from shoal.cost.sizes import parameter_count
from shoal.cost.step import RankWork
from shoal.cost.work import flops_per_token


@dataclass(frozen=True)
class Pace:
    """A model on one rank: seconds by tokens of a micro-batch, and of the update. `is_measured`: of this very model."""

    forward: Line
    backward: Line
    optimizer_s: float
    spread: float
    threads: int
    is_measured: bool

    def work(self, tokens: int, micro_batches: int, busy_cores: float, spare_cores: float) -> RankWork:
        return RankWork(
            micro_batches=micro_batches,
            forward_s=self.forward.seconds(tokens),
            backward_s=self.backward.seconds(tokens),
            optimizer_s=self.optimizer_s,
            busy_cores=busy_cores,
            spare_cores=spare_cores,
        )


def pace_of(node: NodeProfile, model: ModelConfig) -> Pace:
    own = [pace for pace in node.paces if _same_shape(pace.model, model)]
    return _measured(own) if own else _estimated(node.paces, model)


def measured_network(profile: Profile) -> MeasuredNetwork | None:
    """None where there was but one rank, and nothing to exchange."""
    found = {size: profile.collective("all-reduce", size) for size in (4, 2)}
    entries = {size: entry for size, entry in found.items() if entry is not None}
    if not entries:
        return None
    return MeasuredNetwork(
        world_size=entries[4].world_size,
        lines={size: Line(entry.alpha_s, entry.beta_s_per_byte) for size, entry in entries.items()},
        cores={size: entry.cores for size, entry in entries.items()},
    )


def spare_cores(profile: Profile, node: NodeProfile) -> float:
    """Cores a rank's exchange can have to itself while all ranks of its machine compute."""
    here = [each for each in profile.nodes if each.machine == node.machine]
    ranks = sum(each.ranks for each in here)
    computing = sum(each.ranks * each.paces[0].threads for each in here if each.paces)
    return max(0.0, max(each.cores for each in here) - computing) / ranks


def crowding(profile: Profile, node: NodeProfile) -> float:
    """How much slower its ranks are while all nodes of its machine compute: 1 where it has the machine to itself."""
    pace = pace_of(node, SMALL_GPT)
    alone = next((point for point in node.compute.training if point.threads == pace.threads), None)
    if alone is None or sum(each.machine == node.machine for each in profile.nodes) == 1:
        return 1.0
    tokens = node.compute.tokens_per_step
    together_s = pace.forward.seconds(tokens) + pace.backward.seconds(tokens) + pace.optimizer_s
    return max(1.0, together_s * alone.tokens_per_s / tokens)


def _same_shape(one: ModelConfig, other: ModelConfig) -> bool:
    return one.model_copy(update={"dropout": 0.0}) == other.model_copy(update={"dropout": 0.0})


def _measured(paces: Sequence[ModelPace]) -> Pace:
    largest = max(paces, key=lambda pace: pace.micro_batch)
    return Pace(
        forward=_line([(pace.tokens, pace.forward_s) for pace in paces]),
        backward=_line([(pace.tokens, pace.backward_s) for pace in paces]),
        optimizer_s=largest.optimizer_s,
        spread=largest.spread,
        threads=largest.threads,
        is_measured=True,
    )


def _line(samples: list[tuple[int, float]]) -> Line:
    if len(samples) > 1:
        return fit(samples)
    [(tokens, seconds)] = samples
    return Line(0.0, seconds / tokens)


def _estimated(paces: Sequence[ModelPace], model: ModelConfig) -> Pace:
    """By arithmetic, at the speed of the measured models that are nearest in width; overhead goes by layers."""
    names = sorted({pace.name: pace.model.width for pace in paces}.items(), key=lambda item: item[1])
    known = [(width, _measured([pace for pace in paces if pace.name == name]), name) for name, width in names]
    shapes = {pace.name: pace.model for pace in paces}
    below = [entry for entry in known if entry[0] <= model.width] or known[:1]
    above = [entry for entry in known if entry[0] >= model.width] or known[-1:]
    (low, slow, slow_name), (high, fast, fast_name) = below[-1], above[0]
    part = 0.0 if high == low else math.log(model.width / low) / math.log(high / low)

    def scaled(one: Line, other: Line) -> Line:
        low_s = _per_flop(one, shapes[slow_name])
        high_s = _per_flop(other, shapes[fast_name])
        each_s = low_s ** (1 - part) * high_s**part
        return Line(one.alpha_s * model.layers / shapes[slow_name].layers, each_s * flops_per_token(model))

    return Pace(
        forward=scaled(slow.forward, fast.forward),
        backward=scaled(slow.backward, fast.backward),
        optimizer_s=fast.optimizer_s * parameter_count(model) / parameter_count(shapes[fast_name]),
        spread=fast.spread,
        threads=fast.threads,
        is_measured=False,
    )


def _per_flop(line: Line, model: ModelConfig) -> float:
    return line.beta_s_per_byte / flops_per_token(model)

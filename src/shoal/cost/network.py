"""How long an exchange takes among so many ranks: by a link's data sheet, or by what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.errors import ConfigError
from shoal.units import format_number

if TYPE_CHECKING:
    from shoal.config.profile import Op


# SECTION cost/collectives
# What a collective moves over the wire, and how long that takes, by arithmetic.


Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class LinkSpeed:
    """One link, one direction: every message waits `latency_s`, every byte takes its part of `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, messages: float, sent_bytes: float) -> float:
        return messages * self.latency_s + sent_bytes / self.bytes_per_s


def payload_factor(world_size: int) -> float:
    """How often each rank sends the whole gradient in a ring all-reduce: `2(N-1)/N`.

    N-1 rounds of reduce-scatter and N-1 rounds of all-gather, each of one N-th; it tends to 2 however many ranks join.
    """
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    return 2 * (world_size - 1) / world_size


def ring_bytes(world_size: int, grad_bytes: int) -> float:
    """Bytes each rank sends (and receives) for one all-reduce of `grad_bytes`."""
    return payload_factor(world_size) * grad_bytes


def bus_factor(op: Op, world_size: int) -> float:
    """Bytes on a link for each byte of the buffer, as nccl-tests has it: the bus bandwidth then compares with the wire,
    whatever the operation and however many ranks."""
    match op:
        case "all-reduce":
            return payload_factor(world_size)
        case "reduce-scatter" | "all-gather":
            return payload_factor(world_size) / 2
        case "broadcast":
            return 1.0


def algorithm_gbps(buffer_bytes: int, seconds: float) -> float:
    return 8e-9 * buffer_bytes / seconds


def bus_gbps(op: Op, world_size: int, buffer_bytes: int, seconds: float) -> float:
    return bus_factor(op, world_size) * algorithm_gbps(buffer_bytes, seconds)


def collective_s(op: Op, world_size: int, buffer_bytes: float, wire: LinkSpeed, algorithm: Algorithm = "ring") -> float:
    """All ranks at once over equal links, one message after another."""
    if world_size == 1:
        return 0.0
    timed = _ring_s if algorithm == "ring" else _tree_s
    return timed(op, world_size, buffer_bytes, wire)


def hierarchical_s(
    nodes: int, ranks_per_node: int, buffer_bytes: float, inside: LinkSpeed, between: LinkSpeed
) -> float:
    """An all-reduce in three: scattered sums inside each node, those all-reduced between the nodes, and gathered again.

    Between nodes each rank sends its part only, so that a node's link carries the buffer once and not once a rank.
    """
    inner_s = sum(collective_s(op, ranks_per_node, buffer_bytes, inside) for op in ("reduce-scatter", "all-gather"))
    return inner_s + collective_s("all-reduce", nodes, buffer_bytes, between)


def _ring_s(op: Op, world_size: int, buffer_bytes: float, wire: LinkSpeed) -> float:
    """Round by round to the neighbour, one N-th of the buffer in each; a broadcast in as many pieces as ranks."""
    rounds = world_size - 1
    match op:
        case "all-reduce":
            return wire.seconds(2 * rounds, 2 * rounds * buffer_bytes / world_size)
        case "reduce-scatter" | "all-gather":
            return wire.seconds(rounds, rounds * buffer_bytes / world_size)
        case "broadcast":
            return wire.seconds(2 * rounds, 2 * rounds * buffer_bytes / world_size)


def _tree_s(op: Op, world_size: int, buffer_bytes: float, wire: LinkSpeed) -> float:
    """As many messages one after another as the tree is deep.

    The all-reduce is NCCL's pair of trees, in which every rank sends the buffer up once and down once; halving and
    doubling for its two halves; the broadcast is gloo's, which hands the whole buffer on from level to level.
    """
    depth = math.ceil(math.log2(world_size))
    match op:
        case "all-reduce":
            return wire.seconds(2 * depth, 2 * buffer_bytes)
        case "reduce-scatter" | "all-gather":
            return wire.seconds(depth, (world_size - 1) * buffer_bytes / world_size)
        case "broadcast":
            return wire.seconds(depth, depth * buffer_bytes)


# SECTION cost/fit
# Latency and bandwidth of an operation from its measured times: `alpha + beta · bytes`.


Sample = tuple[int, float]
"""Bytes, seconds."""

_TURNS = 60
# Below this a deviation is noise, however well the others agree; above that it is none, however badly they do.
_NOISE = 0.03
_MOST_NOISE = 0.1
_OUTLIER = 4.0
_TINY = 1e-9


@dataclass(frozen=True)
class LinearFit:
    """`alpha_s` is what an empty message would take, `beta_s_per_byte` what each byte adds."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, buffer_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * buffer_bytes

    def error(self, sample: Sample) -> float:
        """Relative to what was measured."""
        return self.seconds(sample[0]) / sample[1] - 1


def fit(samples: Sequence[Sample]) -> LinearFit:
    """Least squares on the *relative* error: 4 kB and 256 MB count alike.

    A disturbed sample is left out: which one it is shows the line of least absolute errors, which a minority cannot
    bend. Where small messages pass faster than the rate (a shaped link saves some up), large ones would put the latency
    below zero; then the smallest message says what it is.
    """
    if len({size for size, _ in samples}) < 2:
        raise ValueError("two parameters need samples of two sizes")
    line = _least_absolute(samples)
    errors = [abs(line.error(sample)) for sample in samples]
    limit = min(_MOST_NOISE, max(_NOISE, _OUTLIER * statistics.median(errors)))
    kept = [sample for sample, error in zip(samples, errors, strict=True) if error <= limit]
    if len({size for size, _ in kept}) > 1:
        line = _weighted(kept, [1 / seconds**2 for _, seconds in kept])
    if line.alpha_s == 0.0:
        size, seconds = min(samples)
        line = LinearFit(max(0.0, seconds - line.seconds(size)), line.beta_s_per_byte)
    return line


def median_error(line: LinearFit, samples: Sequence[Sample]) -> float:
    return statistics.median(abs(line.error(sample)) for sample in samples)


def _least_absolute(samples: Sequence[Sample]) -> LinearFit:
    """By least squares again and again, each time weighing a sample by the inverse of its last error.

    Errors are relative to the line, not to the sample: one that was measured far too small would outweigh all others.
    """
    weights = [1 / seconds**2 for _, seconds in samples]
    for _ in range(_TURNS):
        line = _weighted(samples, weights)
        weights = [_weight(line.seconds(size), seconds) for size, seconds in samples]
    return line


def _weight(expected_s: float, seconds: float) -> float:
    expected_s = max(expected_s, _TINY)
    return 1 / (expected_s**2 * max(abs(seconds / expected_s - 1), _TINY))


def _weighted(samples: Sequence[Sample], weights: Sequence[float]) -> LinearFit:
    """Minimises the sum of `weight · (alpha + beta·bytes − seconds)²`; neither may be negative."""
    rows = [(size, seconds, weight) for (size, seconds), weight in zip(samples, weights, strict=True)]
    n = sum(weight for _, _, weight in rows)
    x = sum(weight * size for size, _, weight in rows)
    xx = sum(weight * size * size for size, _, weight in rows)
    y = sum(weight * seconds for _, seconds, weight in rows)
    xy = sum(weight * size * seconds for size, seconds, weight in rows)
    determinant = n * xx - x * x
    alpha, beta = (xx * y - x * xy), (n * xy - x * y)
    if alpha <= 0 or determinant <= 0:
        return LinearFit(0.0, xy / xx)
    return LinearFit(alpha / determinant, beta / determinant) if beta > 0 else LinearFit(y / n, 0.0)


@dataclass(frozen=True)
class ExchangeCost:
    """`cores` is how many cores of a node it keeps busy while it lasts. For `latency_s` of its seconds messages wait,
    however small they are; the rest is bandwidth."""

    seconds: float
    cores: float = 0.0
    latency_s: float = 0.0

    def times(self, factor: float) -> ExchangeCost:
        return replace(self, seconds=factor * self.seconds, latency_s=factor * self.latency_s)


NOTHING = ExchangeCost(0.0)


class Network(Protocol):
    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> ExchangeCost:
        """Of one buffer; `element_bytes` because adding up halves costs a CPU more than adding up floats."""
        ...


@dataclass(frozen=True)
class RingNetwork:
    """From a data sheet: each of the 2(N-1) rounds waits for a message, and every byte crosses the slowest link.

    `cores_per_byte_s` is what copying and adding up a byte takes one core. `air` is one medium for everybody (Wi-Fi):
    all ranks send at once, and through the access point each byte is on the air twice. `trees` lets large worlds choose
    a tree where that is faster, as NCCL does and gloo does not.
    """

    bytes_per_s: float
    latency_s: float
    cores_per_byte_s: float = 0.0
    air: bool = False
    trees: bool = False

    def wire(self, world_size: int) -> LinkSpeed:
        return LinkSpeed(self.bytes_per_s / (2 * world_size if self.air else 1), self.latency_s)

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> ExchangeCost:
        if world_size == 1:
            return NOTHING
        wire = self.wire(world_size)
        algorithms: tuple[Algorithm, ...] = ("ring", "tree") if self.trees else ("ring",)
        by_algorithm = {each: collective_s("all-reduce", world_size, buffer_bytes, wire, each) for each in algorithms}
        fastest = min(algorithms, key=lambda each: by_algorithm[each])
        seconds = by_algorithm[fastest]
        latency_s = collective_s("all-reduce", world_size, 0, wire, fastest)
        return ExchangeCost(seconds, min(1.0, self.cores_per_byte_s * buffer_bytes / seconds), latency_s)


@dataclass(frozen=True)
class NodesNetwork:
    """Several ranks on each node, `inside` between them and `between` from node to node.

    A flat ring passes every node once and every rank: as many messages as ranks, over the slower of both links. The
    hierarchical one sums up inside first.
    """

    ranks_per_node: int
    inside: RingNetwork
    between: RingNetwork
    hierarchical: bool = False

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> ExchangeCost:
        nodes = world_size // self.ranks_per_node
        if nodes <= 1:
            return self.inside.all_reduce(world_size, buffer_bytes, element_bytes)
        between = self.between.wire(nodes)
        if not self.hierarchical:
            flat = replace(self.between, bytes_per_s=min(between.bytes_per_s, self.inside.bytes_per_s), air=False)
            return flat.all_reduce(world_size, buffer_bytes, element_bytes)
        inner = self.inside.all_reduce(self.ranks_per_node, buffer_bytes, element_bytes)
        outer = self.between.all_reduce(nodes, buffer_bytes, element_bytes)
        seconds = inner.seconds + outer.seconds
        busy_s = inner.cores * inner.seconds + outer.cores * outer.seconds
        return ExchangeCost(seconds, busy_s / seconds, inner.latency_s + outer.latency_s)


@dataclass(frozen=True)
class MeasuredNetwork:
    """From times measured among `world_size` ranks; other sizes by the ring's own arithmetic.

    `lines` and `cores` by bytes of an element: gloo adds up fp16 by another path than fp32.
    """

    world_size: int
    lines: dict[int, LinearFit]
    cores: dict[int, float]

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> ExchangeCost:
        if world_size == 1:
            return NOTHING
        line = self.lines.get(element_bytes, self.lines[4])
        rounds = (world_size - 1) / (self.world_size - 1)
        payload = payload_factor(world_size) / payload_factor(self.world_size)
        latency_s = rounds * line.alpha_s
        seconds = latency_s + payload * line.beta_s_per_byte * buffer_bytes
        return ExchangeCost(seconds, self.cores.get(element_bytes, self.cores.get(4, 0.0)), latency_s)


class NoNetwork:
    """Of a profile with a single rank: what a second one would cost, nobody has measured."""

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> ExchangeCost:
        if world_size > 1:
            raise ConfigError(
                f"the profile knows nothing about exchanges between {world_size} ranks",
                why="it was measured with one rank, or with one machine",
                fix="measure more of them: shoal probe --on …, or name a link instead: --link 1gbe",
            )
        return NOTHING


# SECTION cost/sweep
# Which sizes of a collective are measured, and how often, so that a slow link keeps within the time there is.


FIRST_BYTES = 4 << 10
STEP = 4
SIZES: tuple[int, ...] = tuple(FIRST_BYTES * STEP**power for power in range(9))
"""4 kB, 16 kB … 256 MB."""
FEW_SIZES = (FIRST_BYTES, 64 << 10, 1 << 20, 16 << 20)
"""For what training uses less: enough for two parameters."""

# Two parameters need two sizes, and the smallest two cost next to nothing on any link.
LEAST_SIZES = 2
LEAST_ROUNDS = 3
MOST_ROUNDS = 25
# A small size is repeated within a round, as often as costs no more than this part of it.
_PART = 0.02
_MOST_REPEATS = 8
# What is held out lies half way to the largest size.
_WITH_HELD_OUT = 1.5


def expected_s(size: int, seen: Sequence[Sample]) -> float:
    """From what smaller ones took: all of them by their fit, a single one as if bytes were everything."""
    if len({bytes_ for bytes_, _ in seen}) > 1:
        return fit(seen).seconds(size)
    return max((seconds * max(1.0, size / bytes_) for bytes_, seconds in seen), default=0.0)


def is_affordable(once_s: float, seen: Sequence[Sample], left_s: float) -> bool:
    """Whether a size that takes `once_s` can come round often enough in the time that is left, with all before it."""
    round_s = sum(seconds for _, seconds in seen) + _WITH_HELD_OUT * once_s
    return len(seen) < LEAST_SIZES or LEAST_ROUNDS * round_s <= left_s


def rounds_for(round_s: float, left_s: float) -> int:
    """Rounds over all sizes, rather than one size after another: a noisy moment then hits all of them."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left_s / round_s)))


def repeats_for(once_s: float, round_s: float) -> int:
    return max(1, min(_MOST_REPEATS, int(_PART * round_s / once_s)))


def held_out_size(sizes: Sequence[int]) -> int:
    """Between the two largest that were measured: where a prediction is wanted, and where none was fitted."""
    return max(sizes) // 2


def size_text(buffer_bytes: int) -> str:
    """`4 KiB`, `25 MiB`: the sizes here are powers of two."""
    for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if buffer_bytes >= 0.99 * scale:
            return f"{format_number(buffer_bytes / scale)} {unit}"
    return f"{buffer_bytes} B"

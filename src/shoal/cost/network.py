"""How long a collective takes: bytes on the wire, the alpha-beta model, and networks by data sheet or measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.errors import ConfigError
from shoal.units import format_number

if TYPE_CHECKING:
    from shoal.config.profile import Op

Algorithm = Literal["ring", "tree"]


# Collectives over equal links


@dataclass(frozen=True)
class LinkSpeed:
    """One direction of a link."""

    bytes_per_s: float
    latency_s: float  # of each message

    def seconds(self, messages: float, sent_bytes: float) -> float:
        return messages * self.latency_s + sent_bytes / self.bytes_per_s


def payload_factor(world_size: int) -> float:
    """Return how often each rank sends the whole buffer in a ring all-reduce: `2(N-1)/N`.

    N-1 rounds of reduce-scatter and N-1 rounds of all-gather send one N-th each; the factor stays below 2.
    """
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    return 2 * (world_size - 1) / world_size


def ring_bytes(world_size: int, grad_bytes: int) -> float:
    """Return the bytes that each rank sends (and receives) for one all-reduce of `grad_bytes`."""
    return payload_factor(world_size) * grad_bytes


def bus_factor(op: Op, world_size: int) -> float:
    """Return the bytes on a link per byte of the buffer, as nccl-tests counts them: the bus bandwidth then compares
    with the link, for every operation and number of ranks."""
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
    """Return the time when all ranks send at once over equal links, one message after another."""
    if world_size == 1:
        return 0.0
    return (_ring_s if algorithm == "ring" else _tree_s)(op, world_size, buffer_bytes, wire)


def _ring_s(op: Op, world_size: int, buffer_bytes: float, wire: LinkSpeed) -> float:
    """Each round sends one N-th of the buffer to the neighbour; a broadcast is cut into N pieces."""
    rounds = world_size - 1
    if op in ("all-reduce", "broadcast"):
        rounds *= 2
    return wire.seconds(rounds, rounds * buffer_bytes / world_size)


def _tree_s(op: Op, world_size: int, buffer_bytes: float, wire: LinkSpeed) -> float:
    """The number of messages in sequence is the depth of the tree.

    The all-reduce is NCCL's double tree, in which every rank sends the buffer up once and down once; its two halves use
    halving and doubling; the broadcast is gloo's, which forwards the whole buffer from level to level.
    """
    depth = math.ceil(math.log2(world_size))
    match op:
        case "all-reduce":
            return wire.seconds(2 * depth, 2 * buffer_bytes)
        case "reduce-scatter" | "all-gather":
            return wire.seconds(depth, (world_size - 1) * buffer_bytes / world_size)
        case "broadcast":
            return wire.seconds(depth, depth * buffer_bytes)


# The alpha-beta model: time = alpha + beta · bytes

# (bytes, seconds)
Sample = tuple[int, float]

_ITERATIONS = 60
# A deviation below the first is always noise, and one above the second never is, however well the others agree.
_NOISE = 0.03
_MOST_NOISE = 0.1
_OUTLIER = 4.0
_TINY = 1e-9


@dataclass(frozen=True)
class LinearFit:
    alpha_s: float  # of an empty message
    beta_s_per_byte: float

    def seconds(self, buffer_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * buffer_bytes

    def error(self, sample: Sample) -> float:
        """Return the error relative to the measured time."""
        return self.seconds(sample[0]) / sample[1] - 1


def fit_alpha_beta(samples: Sequence[Sample]) -> LinearFit:
    """Fit by least squares of the *relative* error: 4 kB and 256 MB count alike.

    Outliers are left out; the line of least absolute errors shows which they are, because a minority cannot bend it.
    Where small messages pass faster than the rate (a shaped link saves up tokens), large ones would make the latency
    negative; then the smallest message determines it.
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
    """Repeat least squares, each time weighting a sample by the inverse of its last error.

    Errors are relative to the line, not to the sample: a sample measured far too small would outweigh all others.
    """
    weights = [1 / seconds**2 for _, seconds in samples]
    for _ in range(_ITERATIONS):
        line = _weighted(samples, weights)
        expected = [max(line.seconds(size), _TINY) for size, _ in samples]
        weights = [
            1 / (expected_s**2 * max(abs(seconds / expected_s - 1), _TINY))
            for expected_s, (_, seconds) in zip(expected, samples, strict=True)
        ]
    return line


def _weighted(samples: Sequence[Sample], weights: Sequence[float]) -> LinearFit:
    """Minimise the sum of `weight · (alpha + beta·bytes − seconds)²` with neither of them negative."""
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


# Networks


@dataclass(frozen=True)
class ExchangeCost:
    seconds: float
    cores: float = 0.0  # of a node, busy while the exchange lasts
    latency_s: float = 0.0  # the part of `seconds` that does not depend on the size

    def times(self, factor: float) -> ExchangeCost:
        return replace(self, seconds=factor * self.seconds, latency_s=factor * self.latency_s)


NOTHING = ExchangeCost(0.0)


class Network(Protocol):
    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: float) -> ExchangeCost:
        """Return the cost of one buffer. It depends on `element_bytes`: a CPU adds up fp16 more slowly than fp32."""
        ...


@dataclass(frozen=True)
class RingNetwork:
    """A network by data sheet: each of the 2(N-1) rounds waits for a message, and every byte crosses the slowest
    link."""

    bytes_per_s: float
    latency_s: float
    cores_per_byte_s: float = 0.0  # seconds of a core to copy and add up one byte
    # Wi-Fi is one medium: all ranks send at once, and through the access point each byte is on the air twice.
    is_shared_medium: bool = False
    # Use a tree where that is faster, as NCCL does and gloo does not.
    trees: bool = False
    # The links of the second node and of further ones; those beyond the last are like it.
    later: tuple[RingNetwork, ...] = ()
    # Of a rank that has such a link to each of them: N ranks use N−1 of these links.
    peers: int = 1

    def wire(self, world_size: int) -> LinkSpeed:
        """Return the slowest link of these nodes: all of them carry the same bytes, and each round waits for it."""
        links = (self, *self.later)[:world_size]
        on_air = sum(link.is_shared_medium for link in links)
        on_air += (world_size - len(links)) * links[-1].is_shared_medium
        rates = (
            link.bytes_per_s * max(1, min(world_size - 1, link.peers)) / (2 * on_air if link.is_shared_medium else 1)
            for link in links
        )
        return LinkSpeed(min(rates), max(link.latency_s for link in links))

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: float) -> ExchangeCost:
        if world_size == 1:
            return NOTHING
        wire = self.wire(world_size)
        algorithms: tuple[Algorithm, ...] = ("ring", "tree") if self.trees else ("ring",)
        times = {name: collective_s("all-reduce", world_size, buffer_bytes, wire, name) for name in algorithms}
        fastest = min(algorithms, key=lambda name: times[name])
        seconds = times[fastest]
        latency_s = collective_s("all-reduce", world_size, 0, wire, fastest)
        return ExchangeCost(seconds, min(1.0, self.cores_per_byte_s * buffer_bytes / seconds), latency_s)


@dataclass(frozen=True)
class NodesNetwork:
    """Several ranks per node. A flat ring passes every rank: as many messages as ranks, over the slower of both links.
    The hierarchical all-reduce sums up inside each node first, so that a node's link carries the buffer once."""

    ranks_per_node: int
    inside: RingNetwork
    between: RingNetwork
    hierarchical: bool = False

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: float) -> ExchangeCost:
        nodes = world_size // self.ranks_per_node
        if nodes <= 1:
            return self.inside.all_reduce(world_size, buffer_bytes, element_bytes)
        if not self.hierarchical:
            wire = self.between.wire(nodes)
            slower = min(wire.bytes_per_s, self.inside.wire(self.ranks_per_node).bytes_per_s)
            flat = RingNetwork(slower, wire.latency_s, self.between.cores_per_byte_s, trees=self.between.trees)
            return flat.all_reduce(world_size, buffer_bytes, element_bytes)
        inner = self.inside.all_reduce(self.ranks_per_node, buffer_bytes, element_bytes)
        outer = self.between.all_reduce(nodes, buffer_bytes, element_bytes)
        seconds = inner.seconds + outer.seconds
        busy_s = inner.cores * inner.seconds + outer.cores * outer.seconds
        return ExchangeCost(seconds, busy_s / seconds, inner.latency_s + outer.latency_s)


@dataclass(frozen=True)
class MeasuredNetwork:
    """Times measured among `world_size` ranks; other sizes by the arithmetic of the ring.

    The slowest link bounds a ring. Fewer ranks may not need it.
    """

    world_size: int
    # By bytes of an element: gloo adds up fp16 by another path than fp32.
    lines: dict[float, LinearFit]
    cores: dict[float, float]
    # By number of ranks: the slowest link of all over the slowest link of theirs. 1 where it is missing.
    link_factors: dict[int, float] = field(default_factory=dict)

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: float) -> ExchangeCost:
        if world_size == 1:
            return NOTHING
        line = self.lines.get(element_bytes, self.lines[4])
        rounds = (world_size - 1) / (self.world_size - 1)
        payload = payload_factor(world_size) / payload_factor(self.world_size)
        latency_s = rounds * line.alpha_s
        payload *= self.link_factors.get(world_size, 1.0)
        seconds = latency_s + payload * line.beta_s_per_byte * buffer_bytes
        return ExchangeCost(seconds, self.cores.get(element_bytes, self.cores.get(4, 0.0)), latency_s)


class NoNetwork:
    """The network of a profile with a single rank: nothing was measured."""

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: float) -> ExchangeCost:
        if world_size > 1:
            raise ConfigError(
                f"the profile has no measured exchange between {world_size} ranks",
                why="it was measured with one rank, or with one machine",
                fix="measure more of them: shoal probe --on …, or name a link instead: --link 1gbe",
            )
        return NOTHING


# Which sizes of a collective a probe measures, and how often, so that a slow link stays within the time budget

FIRST_BYTES = 4 << 10
STEP = 4
# 4 kB, 16 kB … 256 MB
SIZES: tuple[int, ...] = tuple(FIRST_BYTES * STEP**power for power in range(9))
# For collectives that training uses less: enough for two parameters.
FEW_SIZES = (FIRST_BYTES, 64 << 10, 1 << 20, 16 << 20)

# Two parameters need two sizes, and the smallest two cost next to nothing on any link.
LEAST_SIZES = 2
LEAST_ROUNDS = 3
MOST_ROUNDS = 25
# A small size is repeated within a round, as often as costs no more than this fraction of the round.
_REPEAT_FRACTION = 0.02
_MOST_REPEATS = 8
# The held-out size is half of the largest one.
_WITH_HELD_OUT = 1.5


def expected_s(size: int, seen: Sequence[Sample]) -> float:
    """Extrapolate from smaller sizes: by their fit, or in proportion to the bytes where there is only one."""
    if len({bytes_ for bytes_, _ in seen}) > 1:
        return fit_alpha_beta(seen).seconds(size)
    return max((seconds * max(1.0, size / bytes_) for bytes_, seconds in seen), default=0.0)


def is_affordable(once_s: float, seen: Sequence[Sample], left_s: float) -> bool:
    """Return whether enough rounds with a size that takes `once_s`, and all smaller ones, fit into the time left."""
    round_s = sum(seconds for _, seconds in seen) + _WITH_HELD_OUT * once_s
    return len(seen) < LEAST_SIZES or LEAST_ROUNDS * round_s <= left_s


def rounds_for(round_s: float, left_s: float) -> int:
    """Return the number of rounds over all sizes. Rounds, because a noisy moment then affects all sizes alike."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left_s / round_s)))


def repeats_for(once_s: float, round_s: float) -> int:
    return max(1, min(_MOST_REPEATS, int(_REPEAT_FRACTION * round_s / once_s)))


def held_out_size(sizes: Sequence[int]) -> int:
    """Return a size between the two largest: where predictions matter, and which the fit has not seen."""
    return max(sizes) // 2


def format_buffer_size(buffer_bytes: int) -> str:
    """Return `4 KiB` or `25 MiB`: the sizes here are powers of two."""
    for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if buffer_bytes >= 0.99 * scale:
            return f"{format_number(buffer_bytes / scale)} {unit}"
    return f"{buffer_bytes} B"

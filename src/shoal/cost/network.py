"""How long an exchange takes among so many ranks: by a link's data sheet, or by what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from shoal.cost.collectives import Algorithm, Wire, collective_s, payload_factor
from shoal.cost.fit import Line
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Exchange:
    """`cores` is how many cores of a node it keeps busy while it lasts. For `latency_s` of its seconds messages wait,
    however small they are; the rest is bandwidth."""

    seconds: float
    cores: float = 0.0
    latency_s: float = 0.0

    def times(self, factor: float) -> Exchange:
        return replace(self, seconds=factor * self.seconds, latency_s=factor * self.latency_s)


NOTHING = Exchange(0.0)


class Network(Protocol):
    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
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

    def wire(self, world_size: int) -> Wire:
        return Wire(self.bytes_per_s / (2 * world_size if self.air else 1), self.latency_s)

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
        if world_size == 1:
            return NOTHING
        wire = self.wire(world_size)
        algorithms: tuple[Algorithm, ...] = ("ring", "tree") if self.trees else ("ring",)
        by_algorithm = {each: collective_s("all-reduce", world_size, buffer_bytes, wire, each) for each in algorithms}
        fastest = min(algorithms, key=lambda each: by_algorithm[each])
        seconds = by_algorithm[fastest]
        latency_s = collective_s("all-reduce", world_size, 0, wire, fastest)
        return Exchange(seconds, min(1.0, self.cores_per_byte_s * buffer_bytes / seconds), latency_s)


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

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
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
        return Exchange(seconds, busy_s / seconds, inner.latency_s + outer.latency_s)


@dataclass(frozen=True)
class MeasuredNetwork:
    """From times measured among `world_size` ranks; other sizes by the ring's own arithmetic.

    `lines` and `cores` by bytes of an element: gloo adds up fp16 by another path than fp32.
    """

    world_size: int
    lines: dict[int, Line]
    cores: dict[int, float]

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
        if world_size == 1:
            return NOTHING
        line = self.lines.get(element_bytes, self.lines[4])
        rounds = (world_size - 1) / (self.world_size - 1)
        payload = payload_factor(world_size) / payload_factor(self.world_size)
        latency_s = rounds * line.alpha_s
        seconds = latency_s + payload * line.beta_s_per_byte * buffer_bytes
        return Exchange(seconds, self.cores.get(element_bytes, self.cores.get(4, 0.0)), latency_s)


class NoNetwork:
    """Of a profile with a single rank: what a second one would cost, nobody has measured."""

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
        if world_size > 1:
            raise ConfigError(
                f"the profile knows nothing about exchanges between {world_size} ranks",
                why="it was measured with one rank, or with one machine",
                fix="measure more of them: shoal probe --on …, or name a link instead: --link 1gbe",
            )
        return NOTHING

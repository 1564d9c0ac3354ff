"""What a collective moves over the wire, and how long that takes, by arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shoal.config.profile import Op

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Wire:
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


def collective_s(op: Op, world_size: int, buffer_bytes: float, wire: Wire, algorithm: Algorithm = "ring") -> float:
    """All ranks at once over equal links, one message after another."""
    if world_size == 1:
        return 0.0
    timed = _ring_s if algorithm == "ring" else _tree_s
    return timed(op, world_size, buffer_bytes, wire)


def hierarchical_s(nodes: int, ranks_per_node: int, buffer_bytes: float, inside: Wire, between: Wire) -> float:
    """An all-reduce in three: scattered sums inside each node, those all-reduced between the nodes, and gathered again.

    Between nodes each rank sends its part only, so that a node's link carries the buffer once and not once a rank.
    """
    inner_s = sum(collective_s(op, ranks_per_node, buffer_bytes, inside) for op in ("reduce-scatter", "all-gather"))
    return inner_s + collective_s("all-reduce", nodes, buffer_bytes, between)


def _ring_s(op: Op, world_size: int, buffer_bytes: float, wire: Wire) -> float:
    """Round by round to the neighbour, one N-th of the buffer in each; a broadcast in as many pieces as ranks."""
    rounds = world_size - 1
    match op:
        case "all-reduce":
            return wire.seconds(2 * rounds, 2 * rounds * buffer_bytes / world_size)
        case "reduce-scatter" | "all-gather":
            return wire.seconds(rounds, rounds * buffer_bytes / world_size)
        case "broadcast":
            return wire.seconds(2 * rounds, 2 * rounds * buffer_bytes / world_size)


def _tree_s(op: Op, world_size: int, buffer_bytes: float, wire: Wire) -> float:
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

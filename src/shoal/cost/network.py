"""How long an exchange takes among so many ranks: by a link's data sheet, or by what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.cost.collectives import payload_factor
from shoal.cost.fit import Line


@dataclass(frozen=True)
class Exchange:
    """`cores` is how many cores of a node it keeps busy while it lasts."""

    seconds: float
    cores: float = 0.0


NOTHING = Exchange(0.0)


class Network(Protocol):
    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
        """Of one buffer; `element_bytes` because adding up halves costs a CPU more than adding up floats."""
        ...


@dataclass(frozen=True)
class RingNetwork:
    """From a data sheet: each of the 2(N-1) rounds waits for a message, and every byte crosses the slowest link."""

    bytes_per_s: float
    latency_s: float
    cores_per_byte_s: float = 0.0

    def all_reduce(self, world_size: int, buffer_bytes: float, element_bytes: int) -> Exchange:
        if world_size == 1:
            return NOTHING
        wire_s = payload_factor(world_size) * buffer_bytes / self.bytes_per_s
        seconds = wire_s + 2 * (world_size - 1) * self.latency_s
        return Exchange(seconds, min(1.0, self.cores_per_byte_s * buffer_bytes / seconds))


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
        seconds = rounds * line.alpha_s + payload * line.beta_s_per_byte * buffer_bytes
        return Exchange(seconds, self.cores.get(element_bytes, self.cores.get(4, 0.0)))

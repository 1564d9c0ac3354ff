"""Which links are measured, with what and for how long, in the time there is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from shoal.cluster.node import Node

Tool = Literal["iperf3", "shoal"]
Pair = tuple[str, str]

STREAMS = (1, 4)
# The ring lasts longer than a single flow: those of its links that start late must overlap the others.
RING_TIMES = 2
_MOST_S = 2.0
_LEAST_S = 0.3
# Starting and ending one flow.
_OVERHEAD_S = 0.15
# iperf3 counts in whole seconds.
_IPERF3_S = 1.0


@dataclass(frozen=True)
class FlowPlan:
    """`ring` are the links that a ring of all nodes uses at once; `notes` is what a reader of the figures must know."""

    tool: Tool
    seconds: float
    pairs: tuple[Pair, ...]
    ring: tuple[Pair, ...]
    notes: tuple[str, ...] = ()

    @property
    def directions(self) -> list[Pair]:
        both = (way for one, other in self.pairs for way in ((one, other), (other, one)))
        return list(dict.fromkeys(both))

    @property
    def flows(self) -> int:
        """One after another: each direction with one stream and with four, then the ring at once, for longer."""
        return len(self.directions) * len(STREAMS) + (RING_TIMES if self.ring else 0)


def plan_flows(nodes: Sequence[Node], iperf3: Mapping[str, str | None], budget_s: float) -> FlowPlan:
    """`iperf3` by node: its version, or None. Too many pairs for the time: only those of the ring."""
    ring = ring_of(nodes)
    every = _all_pairs(nodes)
    # A ring of two goes both ways over the same pair.
    of_ring = tuple(pair for pair in every if pair in ring or pair[::-1] in ring)
    pairs = every if _seconds(every, ring, budget_s) >= _LEAST_S else of_ring
    notes = []
    if pairs != every:
        notes.append(
            f"{len(every)} pairs are too many for the time: only the {len(pairs)} links of the ring were measured"
        )
    seconds = max(_LEAST_S, min(_MOST_S, _seconds(pairs, ring, budget_s)))
    tool, why = _choose(iperf3, seconds) if pairs else ("shoal", "")
    if tool == "iperf3":
        seconds = float(int(seconds))
    return FlowPlan(tool, seconds, pairs, ring, (*notes, why) if why else tuple(notes))


def ring_of(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    """Each node to the next, as ranks are numbered; on one machine every rank to the next, all over its loopback."""
    if len(nodes) == 1:
        name, slots = nodes[0].name, nodes[0].slots
        return ((name, name),) * slots if slots > 1 else ()
    names = [node.name for node in nodes]
    return tuple(zip(names, [*names[1:], names[0]], strict=True))


def _all_pairs(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    if len(nodes) == 1:
        return tuple(dict.fromkeys(ring_of(nodes)))
    return tuple(combinations([node.name for node in nodes], 2))


def _seconds(pairs: tuple[Pair, ...], ring: tuple[Pair, ...], budget_s: float) -> float:
    return budget_s / max(1, FlowPlan("shoal", 0, pairs, ring).flows) - _OVERHEAD_S


def _choose(iperf3: Mapping[str, str | None], seconds: float) -> tuple[Tool, str]:
    """The tool, and why it is not iperf3."""
    without = [name for name, version in iperf3.items() if version is None]
    if without:
        return "shoal", f"raw bandwidth is by shoal's own probe: iperf3 is not installed on {', '.join(without)}"
    if seconds < _IPERF3_S:
        return (
            "shoal",
            f"raw bandwidth is by shoal's own probe: iperf3 needs whole seconds, and each flow had {seconds:.1g}",
        )
    return "iperf3", ""

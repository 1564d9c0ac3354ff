"""Measure the links of a cluster through the meters on its nodes: round trips, and TCP rates alone and together."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cluster.cluster import NodePrograms
from shoal.cluster.node import Node
from shoal.config.profile import LinkProfile

LINK_METER = "shoal.tools.probe.link_meter"
Pair = tuple[str, str]
Report = Callable[[str], None]

STREAMS = (1, 4)
# The ring lasts longer than a single flow: links that start late must overlap the others.
RING_TIMES = 2
_LONGEST_FLOW_S = 2.0
_SHORTEST_FLOW_S = 0.3
# For starting and ending one flow.
_OVERHEAD_S = 0.15


@dataclass(frozen=True)
class FlowPlan:
    seconds: float  # of one flow
    pairs: tuple[Pair, ...]
    ring: tuple[Pair, ...]  # the links that a ring of all nodes uses at the same time
    notes: tuple[str, ...] = ()  # for the readers of the figures

    @property
    def directions(self) -> list[Pair]:
        both = (way for one, other in self.pairs for way in ((one, other), (other, one)))
        return list(dict.fromkeys(both))

    @property
    def flows(self) -> int:
        """Count the flows in sequence: each direction with one stream and with four, then the ring, which is longer."""
        return len(self.directions) * len(STREAMS) + (RING_TIMES if self.ring else 0)


def plan_flows(nodes: Sequence[Node], budget_s: float) -> FlowPlan:
    """Measure all pairs; where the time is too short for that, only those of the ring."""
    ring = ring_of(nodes)
    names = [node.name for node in nodes]
    every = tuple(itertools.combinations(names, 2)) if len(nodes) > 1 else tuple(dict.fromkeys(ring))

    def flow_s(pairs: tuple[Pair, ...]) -> float:
        return budget_s / max(1, FlowPlan(0, pairs, ring).flows) - _OVERHEAD_S

    pairs = every
    notes: tuple[str, ...] = ()
    if flow_s(every) < _SHORTEST_FLOW_S:
        # A ring of two uses the same pair in both directions.
        pairs = tuple(pair for pair in every if pair in ring or pair[::-1] in ring)
    if pairs != every:
        notes = (
            f"{len(every)} pairs are too many for the time: only the {len(pairs)} links of the ring were measured",
        )
    return FlowPlan(max(_SHORTEST_FLOW_S, min(_LONGEST_FLOW_S, flow_s(pairs))), pairs, ring, notes)


def ring_of(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    """Connect each node to the next; on one machine every rank to the next, all over its loopback."""
    if len(nodes) == 1:
        name, slots = nodes[0].name, nodes[0].slots
        return ((name, name),) * slots if slots > 1 else ()
    names = [node.name for node in nodes]
    return tuple(zip(names, [*names[1:], names[0]], strict=True))


_ANSWER_S = 10.0
_FLOW_SLACK_S = 20.0
_ROUND_TRIPS = 300
_ROUND_TRIPS_S = 0.4


class LinkMeters:
    """The meters of all nodes, each listening at its own port for the others."""

    def __init__(self, started: NodePrograms) -> None:
        self._programs = started.programs
        self._addresses = {node.name: node.address for node in started.nodes}
        self._token = secrets.token_hex(16)
        self._sessions = itertools.count()
        self._ports = {
            name: int(program.ask(_ANSWER_S, do="listen", address=self._addresses[name], token=self._token)["port"])
            for name, program in self._programs.items()
        }

    def round_trip_s(self, source: str, target: str) -> float:
        request = {"count": _ROUND_TRIPS, "seconds": _ROUND_TRIPS_S, **self._place(target)}
        return float(self._programs[source].ask(_ANSWER_S, do="round_trip", **request)["median_s"])

    def flows_gbps(self, pairs: Sequence[Pair], streams: int, seconds: float) -> list[float]:
        """Run all flows at the same time; return the rate of each pair, counted by its receiver."""
        requests = [
            {"session": str(next(self._sessions)), "streams": streams, "seconds": seconds, **self._place(target)}
            for _, target in pairs
        ]
        for (_, target), request in zip(pairs, requests, strict=True):
            self._programs[target].ask(_ANSWER_S, do="expect", **request)
        sources, targets = zip(*pairs, strict=True)
        self._ask_all(sources, requests, "send")
        self._ask_all(sources, requests, "sent")
        return [1e-9 * float(answer["bps"]) for answer in self._ask_all(targets, requests, "received")]

    def _ask_all(self, names: Sequence[str], requests: list[dict[str, Any]], step: str) -> list[dict[str, Any]]:
        """Send all requests, then wait for the answers in turn."""
        for name, request in zip(names, requests, strict=True):
            self._programs[name].send(do=step, **request)
        return [self._programs[name].receive_answer(requests[0]["seconds"] + _FLOW_SLACK_S, step) for name in names]

    def _place(self, target: str) -> dict[str, Any]:
        return {"address": self._addresses[target], "port": self._ports[target], "token": self._token}


def measure_links(started: NodePrograms, plan: FlowPlan, report: Report) -> list[LinkProfile]:
    if not plan.pairs:
        return []
    meters = LinkMeters(started)
    round_trips_s: dict[Pair, float] = {}
    for source, target in plan.pairs:
        report(f"round trip {source} ↔ {target}")
        trip_s = meters.round_trip_s(source, target)
        round_trips_s |= {(source, target): trip_s, (target, source): trip_s}
    alone: dict[Pair, list[float]] = {}
    for number, pair in enumerate(plan.directions, 1):
        report(f"raw bandwidth {pair[0]} → {pair[1]} ({number} of {len(plan.directions)})")
        alone[pair] = [meters.flows_gbps([pair], streams, plan.seconds)[0] for streams in STREAMS]
    report(f"all {len(plan.ring)} links of the ring at once")
    together = dict(zip(plan.ring, meters.flows_gbps(plan.ring, STREAMS[-1], RING_TIMES * plan.seconds), strict=True))
    return [
        LinkProfile(
            source=source,
            target=target,
            tool="shoal",
            latency_s=round_trips_s[source, target],
            gbps=one_stream,
            gbps_4_streams=four_streams,
            together_gbps=together.get((source, target)),
        )
        for (source, target), (one_stream, four_streams) in alone.items()
    ]

"""Measures the links of a cluster, through the gauges on its nodes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cluster.cluster import Visit
from shoal.config.profile import LinkProfile
from shoal.net.flow_plan import RING_TIMES, STREAMS, FlowPlan, Pair

GAUGE = "shoal.net.gauge"
_ANSWER_S = 10.0
_FLOW_SLACK_S = 20.0
_TRIPS = 300
_TRIPS_S = 0.4

Say = Callable[[str], None]


class Links:
    """The gauges, each listening at a port of its own for the others."""

    def __init__(self, found: Visit, plan: FlowPlan) -> None:
        self._talks = found.talks
        self._plan = plan
        self._addresses = {node.name: node.address for node in found.nodes}
        self._token = secrets.token_hex(16)
        self._sessions = itertools.count()
        self._ports = {
            name: int(talk.ask(_ANSWER_S, do="listen", address=self._addresses[name], token=self._token)["port"])
            for name, talk in self._talks.items()
        }

    def round_trip_s(self, source: str, target: str) -> float:
        words = {"count": _TRIPS, "seconds": _TRIPS_S, **self._place(target)}
        return float(self._talks[source].ask(_ANSWER_S, do="round_trip", **words)["median_s"])

    def flows_gbps(self, pairs: Sequence[Pair], streams: int, seconds: float) -> list[float]:
        """All at once; each pair's own rate, as its receiver counted it."""
        orders = [self._order(target, streams, seconds) for _, target in pairs]
        for (_, target), order in zip(pairs, orders, strict=True):
            order["port"] = self._talks[target].ask(_ANSWER_S, do="expect", **order)["port"]
        self._for_each(pairs, orders, "send", at=0)
        self._for_each(pairs, orders, "sent", at=0)
        return [1e-9 * float(said["bps"]) for said in self._for_each(pairs, orders, "received", at=1)]

    def _for_each(
        self, pairs: Sequence[Pair], orders: list[dict[str, Any]], step: str, at: int
    ) -> list[dict[str, Any]]:
        """Asked all at once, heard one after the other. `at`: the pair's source (0) or its target (1)."""
        for pair, order in zip(pairs, orders, strict=True):
            self._talks[pair[at]].send(do=step, **order)
        return [self._talks[pair[at]].hear(orders[0]["seconds"] + _FLOW_SLACK_S, step) for pair in pairs]

    def _order(self, target: str, streams: int, seconds: float) -> dict[str, Any]:
        session = str(next(self._sessions))
        how = {"tool": self._plan.tool, "streams": streams, "seconds": seconds}
        return {"session": session, **how, **self._place(target)}

    def _place(self, target: str) -> dict[str, Any]:
        return {"address": self._addresses[target], "port": self._ports[target], "token": self._token}


def measure_links(found: Visit, plan: FlowPlan, say: Say) -> list[LinkProfile]:
    if not plan.pairs:
        return []
    links = Links(found, plan)
    trips = {pair: _round_trip(links, pair, say) for pair in plan.pairs}
    alone: dict[Pair, list[float]] = {}
    for number, (source, target) in enumerate(plan.directions, 1):
        say(f"raw bandwidth {source} → {target} ({number} of {len(plan.directions)}, {plan.tool})")
        alone[source, target] = [links.flows_gbps([(source, target)], streams, plan.seconds)[0] for streams in STREAMS]
    say(f"all {len(plan.ring)} links of the ring at once")
    together = dict(zip(plan.ring, links.flows_gbps(plan.ring, STREAMS[-1], RING_TIMES * plan.seconds), strict=True))
    return [
        LinkProfile(
            source=source,
            target=target,
            tool=plan.tool,
            latency_s=trips[source, target] if (source, target) in trips else trips[target, source],
            gbps=one,
            gbps_4_streams=four,
            together_gbps=together.get((source, target)),
        )
        for (source, target), (one, four) in alone.items()
    ]


def _round_trip(links: Links, pair: Pair, say: Say) -> float:
    say(f"round trip {pair[0]} ↔ {pair[1]}")
    return links.round_trip_s(*pair)
